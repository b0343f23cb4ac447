"""Plugins written for vLLM, on the real model: named, installed as a package, and given as classes.

They stand in `vllm_examples`, and do what the examples in vLLM's documentation do.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
import torch

from logitship import LLM, CustomLogitProcessor, SamplingParams, enable_vllm_names
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.server.config import ServerConfig
from logitship.server.http_server import running_server

EXAMPLES = Path(__file__).parent / "vllm_examples"
LOGITSHIP = str(Path(sysconfig.get_path("scripts"), "logitship"))
TIMEOUT = 120.0
VOCAB_SIZE = 49_152
"""Of the default model."""
TARGET = 1234
TOKENS = 8
NEAR = 1e-3
"""Log-probabilities closer than this may change places in other company, see test_concurrency.py."""

PROMPTS = ("The capital of France is", "The opposite of hot is", "One, two, three,", "Water boils at")
PROMPT_IDS = [504, 3575, 282, 4649, 314]
"""Of the first prompt."""
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": PROMPTS[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    },
    "/v1/completions": {
        "prompt": PROMPTS[0],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    },
}
ROUTES = pytest.mark.parametrize("path", BODIES)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[str]:
    """`logitship serve` on the default model, in a process of its own that finds modules in `folder` too."""
    process = subprocess.Popen(serve_command(*flags), env=environment(folder), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    rest_of_log = Thread(target=process.stderr.read)  # a full pipe would stop the server
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"running on (http://[\d.]+:\d+)", line):
                break
        else:
            pytest.fail("".join(log))
        rest_of_log.start()
        yield found[1]
        process.terminate()
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()
        if rest_of_log.is_alive():
            rest_of_log.join()
        process.stderr.close()


def serve_command(*flags: str) -> list[str]:
    return [LOGITSHIP, "serve", "--port", "0", "--device", "cpu", "--max-model-len", "256", *flags]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


def post(base_url: str, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{base_url}{path}", json=BODIES[path] | fields, timeout=TIMEOUT)


def ask(base_url: str, path: str = "/v1/completions", **fields: Any) -> list[int]:
    """The token ids of a greedy answer."""
    answer = post(base_url, path, fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    token_ids: list[int] = body["output_ids"] if path == "/generate" else body["choices"][0]["token_ids"]
    return token_ids


def ask_together(base_url: str, requests: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The same for requests that are sent at the same time."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda fields: ask(base_url, **fields), requests))


def ask_alone(base_url: str, prompt: str | list[int] = PROMPTS[0], tokens: int = TOKENS, **fields: Any) -> list[int]:
    """The same for a request that has no company, and makes the same answer in any: no other token comes near."""
    given = {"text": prompt} if isinstance(prompt, str) else {"text": None, "input_ids": prompt}
    sampling = BODIES["/generate"]["sampling_params"] | {"max_new_tokens": tokens}
    logprobs = {"return_logprob": True, "top_logprobs_num": 2}
    answer = post(base_url, "/generate", {**given, "sampling_params": sampling, **logprobs, **fields}).json()
    for (best, _, _), (second, _, _) in answer["meta_info"]["output_top_logprobs"]:
        assert best - second > NEAR, "choose another prompt: here rounding decides"
    token_ids: list[int] = answer["output_ids"]
    return token_ids


@pytest.fixture(scope="class")
def named_server() -> Iterator[str]:
    constructor = {"qualname": "target_tokens.configured.TokenFromTheEnd", "kwargs": {"argument": "from_behind"}}
    with serving(
        EXAMPLES,
        "--logits-processors",
        "target_tokens.batch_level:TargetToken",
        "target_tokens.request_level:OnlyTokenForRequests",
        "target_tokens.request_level:RepeatThePromptForRequests",
        "target_tokens.configured:TokenFromTheEnd",
        json.dumps(constructor),
    ) as base_url:
        yield base_url


class TestByName:
    """`logitship serve --logits-processors module:Class …`."""

    @ROUTES
    def test_a_batch_processor(self, named_server: str, path: str) -> None:
        assert ask(named_server, path, vllm_xargs={"target_token": TARGET}) == [TARGET] * TOKENS
        assert TARGET not in ask(named_server, path)

    def test_a_wrapped_callable_of_two_parameters(self, named_server: str) -> None:
        """It sees the output as it grows."""
        begun = [TARGET] * 3
        token_ids = ask(named_server, prompt=PROMPT_IDS, vllm_xargs={"only_token": TARGET, "only_token_steps": 3})
        assert token_ids == begun + ask_alone(named_server, PROMPT_IDS + begun)[: TOKENS - 3]

    def test_a_wrapped_callable_of_three_parameters(self, named_server: str) -> None:
        token_ids = ask(named_server, prompt=PROMPT_IDS, vllm_xargs={"repeat_the_prompt": True})
        assert token_ids == (PROMPT_IDS * TOKENS)[:TOKENS]

    def test_a_constructor_that_reads_the_configuration(self, named_server: str) -> None:
        asked = {"token_from_the_end": 1}
        assert ask(named_server, vllm_xargs=asked | {"only_on": "cpu"}) == [VOCAB_SIZE - 1] * TOKENS
        assert ask(named_server, vllm_xargs=asked | {"only_on": "cuda"}) == ask_alone(named_server)

    def test_a_constructor_with_arguments(self, named_server: str) -> None:
        assert ask(named_server, vllm_xargs={"from_behind": 2}) == [VOCAB_SIZE - 2] * TOKENS

    @ROUTES
    def test_what_the_plugin_refuses(self, named_server: str, path: str) -> None:
        refused = post(named_server, path, {"vllm_xargs": {"target_token": "hello"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "target_token must be a token id, not 'hello'"

    def test_the_openai_client(self, named_server: str) -> None:
        extra_body = {"vllm_xargs": {"target_token": TARGET}, "ignore_eos": True, "return_token_ids": True}
        options: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "max_tokens": TOKENS, "extra_body": extra_body}
        messages: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
        with openai.OpenAI(base_url=f"{named_server}/v1", api_key="any", max_retries=0) as client:
            completion = client.completions.create(prompt=PROMPTS[0], **options)
            assert completion.choices[0].token_ids == [TARGET] * TOKENS
            chat = client.chat.completions.create(messages=messages, **options)
            assert chat.choices[0].token_ids == [TARGET] * TOKENS
            events = list(client.completions.create(prompt=PROMPTS[0], stream=True, **options))
            streamed = [event.choices[0] for event in events if event.choices]
            assert [token_id for choice in streamed for token_id in choice.token_ids or ()] == [TARGET] * TOKENS
            assert "".join(choice.text for choice in streamed) == completion.choices[0].text
            extra_body["vllm_xargs"] = {"target_token": 1.5}
            with pytest.raises(openai.BadRequestError, match=r"target_token must be a token id, not 1\.5"):
                client.completions.create(prompt=PROMPTS[0], **options)

    def test_only_those_who_ask_get_it(self, named_server: str) -> None:
        alone = {prompt: ask_alone(named_server, prompt) for prompt in PROMPTS}
        requests: list[dict[str, Any]] = []
        expected: list[list[int]] = []
        for number in range(4 * len(PROMPTS)):
            prompt = PROMPTS[number // 4]
            argument = ("target_token", None, "only_token", None)[number % 4]
            length = TOKENS - number % 5  # they end at different times, so that rows move
            fields: dict[str, Any] = {"prompt": prompt, "max_tokens": length}
            requests.append(fields | ({"vllm_xargs": {argument: TARGET + number}} if argument else {}))
            expected.append([TARGET + number] * length if argument else alone[prompt][:length])
        assert ask_together(named_server, requests) == expected

    def test_a_request_that_makes_it_fail_fails_alone(self, named_server: str) -> None:
        """The plugin takes any number for a token id, and finds no such column in the logits."""
        alone = ask_alone(named_server)
        with ThreadPoolExecutor() as pool:
            bad = pool.submit(post, named_server, "/v1/completions", {"vllm_xargs": {"target_token": VOCAB_SIZE}})
            others = pool.submit(ask_together, named_server, [{}, {"vllm_xargs": {"target_token": TARGET}}] * 3)
            assert others.result() == [alone, [TARGET] * TOKENS] * 3
        assert bad.result().status_code == 500
        message = bad.result().json()["error"]["message"]
        assert "target_tokens.batch_level:TargetToken failed on this request: IndexError" in message


@pytest.fixture(scope="class")
def installed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    installed = install(EXAMPLES, tmp_path_factory.mktemp("package"))
    with serving(installed) as base_url:
        yield base_url


class TestAsAPackage:
    """Installed beside logitship: active without a flag, by its entry points."""

    def test_it_is_active(self, installed_server: str) -> None:
        requests = [{"vllm_xargs": {"target_token": TARGET}}, {"vllm_xargs": {"only_token": TARGET + 1}}, {}]
        expected = [[TARGET] * TOKENS, [TARGET + 1] * TOKENS, ask_alone(installed_server)]
        assert ask_together(installed_server, requests) == expected

    def test_it_refuses(self, installed_server: str) -> None:
        refused = post(installed_server, "/v1/completions", {"vllm_xargs": {"target_token": "hello"}})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "target_token must be a token id, not 'hello'"

    def test_one_that_does_not_load_stops_the_start(self, tmp_path: Path) -> None:
        project = tmp_path / "project"
        project.mkdir()
        (project / "licensed_tokens.py").write_text("import licence_manager\n")
        (project / "pyproject.toml").write_text(BROKEN_PROJECT)
        installed = install(project, tmp_path)
        started = subprocess.run(
            serve_command(), env=environment(installed), capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert started.returncode == 1
        assert started.stderr == (
            "logitship: logits processor licensed = licensed_tokens:Licensed, of the installed package "
            "licensed-tokens: ModuleNotFoundError: No module named 'licence_manager'\n"
        )


BROKEN_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "licensed-tokens"
version = "1.0"

[project.entry-points."vllm.logits_processors"]
licensed = "licensed_tokens:Licensed"
"""


def install(project: Path, folder: Path) -> Path:
    """Build a project's wheel and install it, as its user would, without a network. Returns where it is."""
    wheels, installed = folder / "wheels", folder / "installed"
    source = folder / "source"
    shutil.copytree(project, source, ignore=shutil.ignore_patterns("__pycache__"))
    run_module("build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    run_module("pip", "install", "--no-index", "--no-deps", "--target", str(installed), str(wheel))
    assert list(installed.glob("*.dist-info/entry_points.txt"))
    return installed


def run_module(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class BatchSizes(LogitsProcessor):
    """Edits nothing, and remembers the largest batch."""

    largest = 0

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            BatchSizes.largest = max(BatchSizes.largest, batch_update.batch_size)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Next(CustomLogitProcessor):
    """Gives each token the logit of the previous one in the vocabulary."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits.roll(1, dims=-1)


@pytest.fixture(scope="module")
def target_token() -> Iterator[type[LogitsProcessor]]:
    """The batch processor of the examples, imported here."""
    assert enable_vllm_names()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("target_tokens.batch_level").TargetToken
    for name in [name for name in sys.modules if name.partition(".")[0] == "target_tokens"]:
        del sys.modules[name]


@pytest.fixture(scope="class")
def given_server(target_token: type[LogitsProcessor]) -> Iterator[str]:
    config = ServerConfig(
        port=0,
        device="cpu",
        max_model_len=256,
        log_level="warning",
        logits_processors=(target_token, BatchSizes),
        enable_custom_logit_processor=True,
        processor_isolation="none",
        logits_processor_pattern=r"target_tokens\.request_level\.\w+",
    )
    with running_server(config) as base_url:
        yield base_url


class TestAsAClass:
    """`ServerConfig(logits_processors=(Class,))` and `LLM(logits_processors=[Class])`."""

    @ROUTES
    def test_over_http(self, given_server: str, path: str) -> None:
        assert ask(given_server, path, vllm_xargs={"target_token": TARGET}) == [TARGET] * TOKENS

    def test_beside_processors_that_requests_bring(self, given_server: str) -> None:
        """Each kind in rows of its own and two kinds in one row, in one batch. Installed ones run first."""
        tokens = 3 * TOKENS  # long enough that all of them are there before the first has ended
        installed = {"vllm_xargs": {"target_token": TARGET}}
        shipped = {"custom_logit_processor": Next.to_str()}
        entry = {"processor": Next.to_str()}
        named = {"qualname": "target_tokens.request_level.OnlyToken", "kwargs": {"token_id": 4321, "steps": None}}
        answers: list[tuple[dict[str, Any], list[int]]] = [
            ({}, ask_alone(given_server, tokens=tokens)),
            (shipped, ask_alone(given_server, tokens=tokens, **shipped)),
            (installed, [TARGET] * tokens),
            (installed | shipped, [TARGET + 1] * tokens),
            (installed | {"logits_processors": [entry, entry]}, [TARGET + 2] * tokens),
            ({"logits_processors": [named]}, [4321] * tokens),
            ({"logits_processors": [named, entry]}, [4322] * tokens),
            ({"logits_processors": [entry, named]}, [4321] * tokens),
        ]
        assert answers[1][1][0] == answers[0][1][0] + 1
        BatchSizes.largest = 0
        given = ask_together(given_server, [{**request, "max_tokens": tokens} for request, _ in answers])
        assert given == [answer for _, answer in answers]
        assert BatchSizes.largest == len(answers)

    def test_offline(self, target_token: type[LogitsProcessor]) -> None:
        by_name = "target_tokens.configured:TokenFromTheEnd"
        with LLM(device="cpu", max_model_len=256, logits_processors=[target_token, by_name]) as llm:

            def token_ids(*extra_args: dict[str, Any] | None) -> list[list[int]]:
                options: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
                params = [SamplingParams(extra_args=each, **options) for each in extra_args]
                outputs = llm.generate([PROMPTS[0]] * len(params), params, use_tqdm=False)
                return [output.outputs[0].token_ids for output in outputs]

            first, plain, last = token_ids({"target_token": TARGET}, None, {"token_from_the_end": 1})
            assert (first, last) == ([TARGET] * TOKENS, [VOCAB_SIZE - 1] * TOKENS)
            assert [plain] == token_ids(None)
            with pytest.raises(ValueError, match="target_token must be a token id, not 'hello'"):
                token_ids({"target_token": "hello"})


def test_a_script_for_vllm() -> None:
    """`from vllm import LLM` after one call, in a process of its own."""
    script = EXAMPLES / "offline.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    hello, capital, moon = (line.partition("' ") for line in done.stdout.splitlines())
    assert (hello[0], json.loads(hello[2])) == ("'Hello, my name is", [67] * 16)
    assert (moon[0], json.loads(moon[2])) == ("'The moon is", [128] * 16)
    assert capital[0] == "'The capital of France is"
    assert not {67, 128} & set(json.loads(capital[2]))
