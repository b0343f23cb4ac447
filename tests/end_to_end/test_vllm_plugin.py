"""One program, several servers: `logitship serve`, and the real `vllm serve` with logitship as its plugin, on a CPU.

Everything here goes over HTTP with logitship's client; only the address differs. vLLM is the real one, in a virtual
environment of its own that `tests/peers/vllm_cpu.sh` makes (`LOGITSHIP_PEER_CACHE`, else `~/.cache/logitship-peers`).
It runs once with synchronous and once with asynchronous scheduling. All compute prompts in chunks of 64 tokens; vLLM
has room for so few that it has to put requests aside.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from logitship import BadRequestError, Client, CustomLogitProcessor, GenerationError, InstalledProcessor
from logitship.server.model.default_model import default_model_folder

pytestmark = pytest.mark.timeout(1500)  # the first time, vLLM is installed

ROOT = Path(__file__).parents[2]
STRINGS: dict[str, str] = json.loads((ROOT / "tests" / "data" / "sglang_strings.json").read_text())["strings"]
PROMPT = "The quick brown fox"
LONG_PROMPT = "one two three four five six seven eight nine ten " * 12
"""More tokens than are computed in one step."""
LONG_IDS = [*range(500, 650)]
"""More than one of the blocks of 128 tokens that vLLM keeps in its cache on a CPU.

In the greedy answers that are compared here, the two most likely tokens are 0.01 apart and more (log-probabilities).
Rounding moves them by some 1e-4, so that other requests in the batch decide about none.
"""
TOKENS = 12
FIRST = 1000


class CountsCalls(CustomLogitProcessor):
    """The n-th call for a sequence forces token `first` + n; and only if it saw n tokens, which are its own."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            calls = request.state.setdefault("calls", 0)
            request.state["calls"] = calls + 1
            expected = [params["first"] + call for call in range(calls)]
            if list(request.output_ids) != expected:
                raise AssertionError(f"call {calls} saw {request.output_ids}")
            logits[row] = -float("inf")
            logits[row, params["first"] + calls] = 0.0
        return logits


class Testifies(CustomLogitProcessor):
    """Leaves the model's choice alone, up to a last token that tells what it saw in how many calls."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            calls = request.state["calls"] = request.state.get("calls", 0) + 1
            if len(request.output_ids) == params["last"]:
                logits[row] = -float("inf")
                logits[row, witnessed(request.origin_input_ids, request.output_ids, calls)] = 0.0
        return logits


def witnessed(prompt: Sequence[int], output: Sequence[int], calls: int) -> int:
    """A token that stands for a history."""
    return zlib.crc32(repr((list(prompt), list(output), calls)).encode()) % 10_000


class FailsAtThird(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        if len((custom_param_list or [])[0]["__req__"].output_ids) == 2:
            raise RuntimeError("the third token is too much")
        return logits


class Hangs(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        while True:
            pass


class CannotBeMade(CustomLogitProcessor):
    def __init__(self) -> None:
        raise RuntimeError("no instance of this")

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


class Server:
    """A server's process and its log.

    Args:
        ready: what it logs when it serves.
        scheduling: what the plugin says of vLLM's scheduling.
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
        """Waits for `ready` in the log."""
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
        """End it, with all its processes."""
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
    server = Server([*command, "--enable-custom-logit-processor"], {}, r"running on (http://[\d.]+:\d+)")
    try:
        yield server.wait_until_ready()[1], server
    finally:
        server.close()


@contextmanager
def vllm_serve(request: pytest.FixtureRequest, paths: Sequence[Path] = ()) -> Iterator[tuple[str, Server]]:
    """Run `vllm serve` until the end of the block.

    Args:
        request: to get the fixture of vLLM's environment.
        paths: more folders that its processes import from.
    """
    vllm: Path = request.getfixturevalue("vllm_environment")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(vllm / "bin" / "vllm"), "serve", str(default_model_folder()), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "12"]
    command += ["--logits-processors", "logitship.server.vllm:LogitshipLogitsProcessor"]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *paths))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR": "1",
    }
    server = Server(command, environment, "Application startup complete", ["asynchronous" if paths else "synchronous"])
    try:
        server.wait_until_ready()
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.close()


SERVERS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[tuple[str, Server]]]] = {
    "logitship": logitship_serve,
    "vllm": vllm_serve,
    "vllm_async": partial(vllm_serve, paths=[Path(__file__).with_name("vllm_async")]),
}


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with SERVERS[request.param](request) as served:
        yield served


@pytest.fixture
def client(served: tuple[str, Server]) -> Iterator[Client]:
    with Client(served[0], timeout=300) as client:
        yield client


COUNTS_CALLS = CountsCalls.to_str()


def generate(client: Client, prompt: str | list[int] = PROMPT, tokens: int = TOKENS, **options: Any) -> list[int]:
    """The tokens of a greedy answer."""
    answer = client.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True, **options)
    return list(answer.output_ids)


def test_force_token(client: Client) -> None:
    assert generate(client, processor=STRINGS["ForceToken"], params={"token_id": 1234}) == [1234] * TOKENS


def test_boost(client: Client) -> None:
    """It adds 7.5 to a logit: enough for a token that is 3 behind the first, too little for one that is 9 behind."""
    first, near, far = 351, 365, 253
    assert generate(client, tokens=1) == [first]
    assert generate(client, tokens=1, processor=STRINGS["Boost"], params={"token_id": near}) == [near]
    assert generate(client, tokens=1, processor=STRINGS["Boost"], params={"token_id": far}) == [first]


def test_countdown(client: Client) -> None:
    prompt_tokens = client.generate(PROMPT, max_new_tokens=1).usage.prompt_tokens
    assert generate(client, processor=STRINGS["Countdown"]) == [prompt_tokens + step for step in range(TOKENS)]


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["short", "in_chunks"])
def test_a_processor_is_called_once_for_each_token(client: Client, prompt: str) -> None:
    tokens = generate(client, prompt, processor=CountsCalls, params={"first": FIRST})
    assert tokens == [FIRST + step for step in range(TOKENS)]


def test_a_cached_prefix(served: tuple[str, Server], client: Client) -> None:
    """The second time, vLLM does not compute the beginning of the prompt."""
    alone = generate(client, LONG_IDS)
    hits = vllm_counter(served[0], "prefix_cache_hits")
    for _ in range(2):
        last = TOKENS - 1
        tokens = generate(client, LONG_IDS, processor=Testifies, params={"last": last})
        assert tokens == [*alone[:last], witnessed(LONG_IDS, alone[:last], TOKENS)]
    if hits is not None:
        assert (vllm_counter(served[0], "prefix_cache_hits") or 0) > hits


def vllm_counter(url: str, name: str) -> float | None:
    """One of vLLM's counters; None where it is not vLLM that serves."""
    found = re.search(rf"^vllm:{name}_total\S* (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else None


def test_installed_by_name(client: Client) -> None:
    """Two paths from the start token, 225, to the end token, 2."""
    tree = {"prefix_dict": {"225": [300, 400], "225_300": [301], "225_400": [401]}, "end_token_id": 2}
    tokens = generate(client, tokens=2, processor=InstalledProcessor("tree"), params={"tree": tree})
    assert tokens in ([300, 301], [400, 401])


def test_several_continuations(client: Client) -> None:
    """Each is a sequence of its own, with a state of its own."""
    answers = client.generate(
        PROMPT, n=2, max_new_tokens=TOKENS, ignore_eos=True, processor=CountsCalls, params={"first": FIRST}
    )
    assert [list(answer.output_ids) for answer in answers] == [[FIRST + step for step in range(TOKENS)]] * 2


def test_several_in_a_request(client: Client) -> None:
    """In their order, each with its own parameters: what the second forbids, the first cannot give."""
    forced = {"processor": STRINGS["ForceToken"], "params": {"token_id": 1234}}
    boosted = {"processor": STRINGS["Boost"], "params": {"token_id": 1234}}
    assert generate(client, logits_processors=[boosted, forced]) == [1234] * TOKENS


def test_faults_end_their_own_requests(client: Client) -> None:
    """All at once: two processors, one that raises, one that hangs, and requests that carry none."""
    prompts = ["The moon is", "Once upon a time", "My favourite colour", "In the beginning"]
    alone = [generate(client, prompt, tokens=24) for prompt in prompts]

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
        assert [each.result() for each in others] == alone
        assert forced.result() == [5] * TOKENS
        assert counted.result() == [FIRST + step for step in range(TOKENS)]


def test_two_processors_in_a_batch(client: Client) -> None:
    """Each begins before the other ends. Both are loaded by then, which may take longer than an answer."""
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


def test_a_class_that_hung_runs_again(client: Client) -> None:
    for _ in range(2):
        with pytest.raises(GenerationError):
            generate(client, processor=Hangs)
    assert len(generate(client)) == TOKENS


def test_what_cannot_be_loaded_is_refused(client: Client) -> None:
    with pytest.raises(BadRequestError, match="no instance of this"):
        generate(client, processor=CannotBeMade)
    with pytest.raises(BadRequestError, match="no processor is installed or registered as 'nothing'"):
        generate(client, processor=InstalledProcessor("nothing"))
    with pytest.raises(BadRequestError, match="token_ids: missing"):
        generate(client, processor=InstalledProcessor("disallowed_tokens"), params={})


def test_vllm_schedules_as_asked(served: tuple[str, Server]) -> None:
    """The plugin says what vLLM told it."""
    scheduling = re.findall(r"with (\w+) scheduling", "".join(served[1].log))
    assert scheduling == served[1].scheduling


def test_more_than_fits(served: tuple[str, Server], client: Client) -> None:
    """Requests are put aside and taken up again; vLLM then computes them once more, and no processor is told.

    All begin in a block of vLLM's cache, and need a second one while they are computed together.
    """
    tokens, last = 64, 63
    prompts = [[place, *LONG_IDS[:89]] for place in range(1000, 1008)]
    alone = [generate(client, prompt, tokens) for prompt in prompts[:2]]

    def counted(prompt: list[int]) -> list[int]:
        return generate(client, prompt, tokens, processor=COUNTS_CALLS, params={"first": prompt[0]})

    testified = partial(generate, client, tokens=tokens, processor=Testifies, params={"last": last})
    with ThreadPoolExecutor(max_workers=10) as pool:
        counting = [pool.submit(counted, prompt) for prompt in prompts[2:]]
        plain = [pool.submit(generate, client, prompt, tokens) for prompt in prompts[:2]]
        testifying = [pool.submit(testified, prompt) for prompt in prompts[:2]]
    for prompt, counts in zip(prompts[2:], counting, strict=True):
        assert counts.result() == [prompt[0] + step for step in range(tokens)]
    assert [each.result() for each in plain] == alone
    for prompt, answer, testimony in zip(prompts, alone, testifying, strict=False):
        assert testimony.result() == [*answer[:last], witnessed(prompt, answer[:last], tokens)]
    put_aside = vllm_counter(served[0], "num_preemptions")
    assert put_aside is None or put_aside > 0
