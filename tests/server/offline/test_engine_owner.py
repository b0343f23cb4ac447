from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from logitship.server.config import ServerConfig
from logitship.server.engine.build import build_engine
from logitship.server.model.model_loader import LoadedModel
from logitship.server.offline import engine_owner
from logitship.server.offline.async_llm import AsyncLLM
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_options_reach_engine(
    kind: type[LLM] | type[AsyncLLM], loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_owner, "build_engine", lambda config: build_engine(config, loaded_model))
    owner: Any = kind("tiny", seed=3, max_num_seqs=2)
    assert owner._engine.config == ServerConfig(
        model_path="tiny",
        random_seed=3,
        max_num_seqs=2,
        enable_custom_logit_processor=True,
        logits_processor_pattern=".*",
        processor_isolation="none",
    )
    assert owner.get_tokenizer() is loaded_model.tokenizer.hf_tokenizer
    owner.shutdown()


def test_batch_processor_runs_for_all_prompts(loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a class with vLLM's interface that reads `extra_args`."""
    from logitship.sampler.batch_processors.adapter import AdapterLogitsProcessor

    class Target(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            token_id = (params.extra_args or {}).get("target_token")
            if token_id is None:
                return None

            def force(output_token_ids: list[int], logits: Any) -> Any:
                logits[token_id] += 1000
                return logits

            return force

    monkeypatch.setattr(engine_owner, "build_engine", lambda config: build_engine(config, loaded_model))
    with LLM("tiny", logits_processors=[Target]) as llm:
        forced = [SamplingParams(max_tokens=2, extra_args={"target_token": token_id}) for token_id in (40, 50)]
        outputs = llm.generate(["a", "b", "c"], [*forced, SamplingParams(max_tokens=2)], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[:2]] == [[40, 40], [50, 50]]
    assert outputs[2].outputs[0].token_ids not in ([40, 40], [50, 50])


def test_program_without_shutdown_exits(tmp_path: Path) -> None:
    """Exit during a request, with an `LLM` in a reference cycle that is freed at interpreter exit."""
    program = """
        import asyncio, contextlib, importlib.util, sys, threading

        from logitship import LLM, AsyncLLM, SamplingParams
        from logitship.server.config import ServerConfig
        from logitship.server.engine.build import build_engine
        from logitship.server.model.model_loader import LoadedModel
        from logitship.server.tokenizer import Tokenizer

        sys.path.insert(0, ".")
        spec = importlib.util.spec_from_file_location("tiny", "tests/conftest.py")
        tiny = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tiny)
        loaded = LoadedModel(tiny.tiny_model(), Tokenizer(tiny._byte_tokenizer()), frozenset({1}), 260, 512)

        def engine():
            return build_engine(ServerConfig(model_path="tiny", max_num_seqs=2), loaded)

        llm, async_llm = LLM._from_engine(engine()), AsyncLLM._from_engine(engine())
        llm.itself = llm
        started = threading.Event()

        def signal_start(output_token_ids, logits):
            started.set()
            return logits

        async def main():
            params = SamplingParams(max_tokens=None, ignore_eos=True, logits_processors=[signal_start])
            async for output in async_llm.generate("a", params):
                break

        params = SamplingParams(max_tokens=None, ignore_eos=True, logits_processors=[signal_start])

        def wait():
            with contextlib.suppress(RuntimeError):  # the interpreter's exit shuts the LLM down
                llm.generate(["a"] * 50, params, use_tqdm=False)

        threading.Thread(target=wait, daemon=True).start()
        assert started.wait(60)
        asyncio.run(main())
        print("done")
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
    assert result.stderr == ""


def test_collected_while_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12, none can while the interpreter shuts down."""
    errors: list[BaseException] = []
    ended: list[bool] = []

    def collect() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            try:
                engine_owner._end_from_anywhere(lambda: ended.append(True))
            except RuntimeError as error:
                errors.append(error)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    thread = threading.Thread(target=collect)
    thread.start()
    thread.join()
    assert not errors
    assert not ended
