"""A tiny random model, made here, for everything that does not need a real one."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from logitship.sampler.sandbox.protocol import Channel
from logitship.sampler.sandbox.zygote_process import ZygoteProcess
from logitship.server.config import ServerConfig
from logitship.server.engine import processor_setup
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.tokenizer import Tokenizer
from tests.helpers.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.helpers.engine_requests import BuildEngine
from tests.helpers.random_cases import register_profiles

SPECIAL_TOKENS = ["<s>", "</s>", "<think>", "</think>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that every character beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<think>", "</think>"],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_model(vocab_size: int = 260, max_len: int = 512, seed: int = 0) -> LlamaForCausalLM:
    """Two layers with random weights, large enough that the most likely token varies."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


HERE = Path(__file__).parent
THOROUGH = (
    "benchmarks/test_smoke.py",
    "builtin_processors/test_zoo_originals.py",
    "client/test_hugging_face.py",
    "client/serialization/test_sglang_peer.py",
    "containers",
    "deploy/test_chart.py",
    "end_to_end",
    "sampler/ops/test_exact_sampling.py",
    "sampler/sandbox/test_leaks.py",
    "sandbox/escapes/test_ordinary_user.py",
    "sandbox/test_fair_shares.py",
    "sandbox/test_faults_under_load.py",
    "sandbox/test_kills.py",
    "sandbox/test_noisy_neighbours.py",
    "sandbox/test_ready.py",
    "sandbox/test_server_ends.py",
    "server/check/checks",
    "server/dev/test_dev_command.py",
    "server/dev/test_session.py",
    "server/http/test_fuzz.py",
    "server/http/test_json_whitespace.py",
    "server/model/test_deterministic.py",
    "server/model/test_packed_linear_memory.py",
    "server/offline/test_engine_owner.py",
    "server/playground",
    "server/test_http_server.py",
    "server/vllm_names/test_import_hook.py",
    "test_cookbook.py",
    "test_site.py",
    "test_wheel.py",
)
"""Run by `--all` only: tests that need a peer, a browser or downloads, that count on a share of the cores, or that take
long for what they cover."""
SLOW = (
    "builtin_processors/grammars/test_compiler.py",
    "builtin_processors/parts/test_phrase_processor.py",
    "builtin_processors/test_composition.py",
    "client/test_imports.py",
    "sampler/sandbox",
    "sandbox",
    "server/check",
    "server/engine/test_beam_group.py",
    "server/engine/test_blocked_digests.py",
    "server/engine/test_deferred_calls.py",
    "server/engine/test_failed_thread_starts.py",
    "server/engine/test_fault_isolation.py",
    "server/engine/test_forced_tokens.py",
    "server/engine/test_parallel_samples.py",
    "server/engine/test_scheduler.py",
    "server/engine/test_speculative_decoding.py",
    "server/http/test_documentation.py",
    "server/http/test_logits_processors.py",
    "server/http/test_metrics_routes.py",
    "server/http/test_real_engine.py",
    "server/offline/test_llm.py",
    "server/runtime/test_plugin_metrics.py",
    "test_documentation.py",
)
"""Left out by `--fast`, beside those: tests that need sandboxes or the default model, or take long because they count
samples, measure memory or start programs."""
PEERS = frozenset({"clients_environment", "sglang", "results"})
"""Fixtures that start a peer, or download one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="run only tests that take milliseconds, and need no sandbox")
    parser.addoption(
        "--all",
        action="store_true",
        help="run all tests, also those that need peers or a browser, or take long, with all random examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    register_profiles()
    settings.load_profile("fast" if config.getoption("--fast") else "all" if config.getoption("--all") else "default")
    if missing := [path for path in SLOW + THOROUGH if not (HERE / path).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names tests that do not exist: {', '.join(missing)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = THOROUGH * (not _runs_thorough(config)) + SLOW * _is_fast(config)
    return True if collection_path in [HERE / path for path in left_out] else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        is_left_out = (_is_thorough(item) and not _runs_thorough(config)) or (_is_slow(item) and _is_fast(config))
        (left_out if is_left_out else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _is_fast(config: pytest.Config) -> bool:
    return bool(config.getoption("--fast"))


def _runs_thorough(config: pytest.Config) -> bool:
    """Return whether thorough tests run: with `--all`, and if the command line names a path below this folder."""
    paths = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    return bool(config.getoption("--all")) or any(HERE in path.resolve().parents for path in paths)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what exists after the imports out of garbage collections.

    A million objects of libraries never become garbage, and take each full collection nearly a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_thorough(item: pytest.Item) -> bool:
    """Return whether a test is marked as thorough, or needs a peer."""
    fixtures = getattr(item, "fixturenames", ())
    return item.get_closest_marker("thorough") is not None or not PEERS.isdisjoint(fixtures)


def _is_slow(item: pytest.Item) -> bool:
    """Return whether a test is marked as slow, or has a parameter that asks for sandboxes."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    marked = item.get_closest_marker("slow") is not None
    # An array compares by element.
    sandboxed = any(isinstance(param, str) and param == "sandbox" for param in params.values())
    return marked or sandboxed


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Install Python's default SIGINT handler, which is missing if a shell started Python in the background.

    Child processes have it, too.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(_byte_tokenizer())


@pytest.fixture(scope="session")
def loaded_model(tokenizer: Tokenizer) -> LoadedModel:
    """The tiny model: 260 tokens, of which 0 to 3 are special and 1 is the EOS token; 512 tokens long.

    In float64, so that no token depends on rounding. In float32, the last bits of logits depend on the batch
    composition and on the CPU, and now and then another token is sampled.
    """
    return _tiny(tokenizer, torch.float64)


@pytest.fixture(scope="session")
def float32_model(tokenizer: Tokenizer) -> LoadedModel:
    """The tiny model in float32, the default dtype of the server, which fused layers compute."""
    return _tiny(tokenizer, torch.float32)


@pytest.fixture(scope="session")
def long_model(tokenizer: Tokenizer) -> LoadedModel:
    """The same as `loaded_model`, but 2,048 tokens long."""
    return _tiny(tokenizer, torch.float64, max_len=2048)


@pytest.fixture(scope="session")
def unserved_model(tokenizer: Tokenizer) -> LoadedModel:
    """The tiny model for tests without an engine. An engine replaces the attention of the model that it serves."""
    return _tiny(tokenizer, torch.float64)


@pytest.fixture(scope="session")
def deterministic_model(tokenizer: Tokenizer) -> LoadedModel:
    """The float32 model for engines with `enable_deterministic_inference`, which replace its layers permanently."""
    return _tiny(tokenizer, torch.float32)


def _tiny(tokenizer: Tokenizer, dtype: torch.dtype, max_len: int = 512) -> LoadedModel:
    model: LlamaForCausalLM = tiny_model(max_len=max_len).to(dtype)  # type: ignore[arg-type]
    return LoadedModel(model=model, tokenizer=tokenizer, eos_token_ids=frozenset({1}), vocab_size=260, max_len=max_len)


@pytest.fixture(scope="session")
def model_folder(float32_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny")
    float32_model.model.save_pretrained(folder)
    float32_model.tokenizer.hf_tokenizer.save_pretrained(folder)
    return folder


PERCENTAGE = re.compile(r"(\d+\.\d+)%")


@pytest.fixture(scope="session")
def is_shown() -> Callable[[str, str], bool]:
    """Tells whether a page shows an output: (text in the page, output).

    Text may be wrapped in the page, and `…` stands for text that differs from run to run. Percentages may differ by one
    in their last digit: the default model's logits differ by up to about 1e-4 between CPUs and batches, and so a
    probability by less than 0.01 %, which may change its rounded value.
    """

    def shown(page: str, output: str) -> bool:
        parts = PERCENTAGE.split(" ".join(page.split()))
        texts, percentages = parts[::2], parts[1::2]
        pattern = PERCENTAGE.pattern.join(".*".join(map(re.escape, text.split("…"))) for text in texts)
        found = re.fullmatch(pattern, " ".join(output.split()))
        return found is not None and all(
            abs(float(one) - float(other)) < 1.5 * 10.0 ** -len(one.partition(".")[2])
            for one, other in zip(percentages, found.groups(), strict=True)
        )

    return shown


@pytest.fixture(scope="session")
def lasting_launchers() -> Iterator[type[ZygoteProcess]]:
    """A `ZygoteProcess` that hands its launcher, if it is alive, to the next one instead of ending it.

    A launcher needs three seconds to import torch. It keeps no state but these imports: it forks a new zygote for each
    engine. A launcher with another `sys.path` is not reused.
    """
    idle: list[tuple[subprocess.Popen[bytes], Channel]] = []
    folders = [*sys.path]

    class LastingLauncher(ZygoteProcess):
        def _start_launcher(self) -> None:
            if not idle or sys.path != folders:
                super()._start_launcher()
                return
            self._launcher, self._launcher_channel = idle.pop()

        def close(self) -> None:
            with self._lock:
                launcher, channel = self._launcher, self._launcher_channel
                if launcher is not None and channel is not None and self.alive and sys.path == folders:
                    self._launcher = self._launcher_channel = None
                    idle.append((launcher, channel))
            super().close()

    yield LastingLauncher
    for launcher, channel in idle:
        channel.close()
        launcher.wait()


@pytest.fixture
def make_engine(
    loaded_model: LoadedModel, deterministic_model: LoadedModel, lasting_launchers: type[ZygoteProcess]
) -> Iterator[BuildEngine]:
    """Builds engines, and stops them after the test.

    The tokens of two runs are equal, because the model computes in float64. A test that compares log-probabilities to
    the last bit sets `enable_deterministic_inference`.
    """
    yield from _engines(loaded_model, deterministic_model, lasting_launchers)


@pytest.fixture(scope="module")
def make_module_engine(
    loaded_model: LoadedModel, deterministic_model: LoadedModel, lasting_launchers: type[ZygoteProcess]
) -> Iterator[BuildEngine]:
    """Builds engines, and stops them after the tests of the file."""
    yield from _engines(loaded_model, deterministic_model, lasting_launchers)


def _engines(
    loaded_model: LoadedModel, deterministic_model: LoadedModel, lasting_launchers: type[ZygoteProcess]
) -> Iterator[BuildEngine]:
    engines: list[AsyncEngine] = []

    def build(loaded: LoadedModel | None = None, **settings: object) -> AsyncEngine:
        if loaded is None:
            loaded = deterministic_model if settings.get("enable_deterministic_inference") else loaded_model
        defaults: dict[str, object] = {"model_path": "tiny", "max_num_seqs": 4, "random_seed": 0}
        defaults["enable_custom_logit_processor"] = True
        defaults["processor_isolation"] = "none"  # sandboxes take seconds to start: tests of theirs ask for them
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor_setup, "ZygoteProcess", lasting_launchers)
            engines.append(build_engine(ServerConfig(**(defaults | settings)), loaded))  # type: ignore[arg-type]
        return engines[-1]

    yield build
    for engine in engines:
        engine.stop()
