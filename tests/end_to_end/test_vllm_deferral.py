"""Requests whose calls are late sit steps out in the real `vllm serve`, on a CPU.

vLLM runs in one process beside its API server, as it does with one GPU, once with synchronous and once with
asynchronous scheduling. `Late` shows in the tokens what it saw, and fails if it is not called once for each.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.server.model.default_model import default_model_folder
from tests.helpers.metrics import read_metrics

from .test_vllm_plugin import KEYS, Server, vllm_serve

pytestmark = pytest.mark.timeout(1500)  # vLLM is installed on first use

TOKENS = 16
HEADERS = {"authorization": f"Bearer {KEYS[0]}"}
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise vLLM's scheduler and model run in two processes on a CPU
    "LOGITSHIP_VLLM_STEP_SHARE": "0.001",
    "LOGITSHIP_VLLM_SANDBOX_STEP_TIMEOUT": "5",
    "LOGITSHIP_VLLM_SANDBOX_FIRST_STEP_TIMEOUT": "1",
}
LATE = 0.4
"""Seconds of a call that is late. Steps wait for one second for the first calls of a request."""


class Late(CustomLogitProcessor):
    """Prefers a token that depends on the history and on the number of calls. Every second call is late."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        seconds = 0.0
        for row, params in enumerate(custom_param_list or ()):
            request = params["__req__"]
            calls = request.state["calls"] = request.state.get("calls", 0) + 1
            if calls != len(request.output_ids) + 1:
                raise AssertionError(f"call {calls} saw {request.output_ids}")
            if params.get("first") is None:
                logits[row, 100 + (7 * calls + sum(request.output_ids)) % 1000] += 4.0
            else:
                logits[row] = -float("inf")
                logits[row, params["first"] + calls] = 0.0
            if calls % 2 == 0:
                seconds = max(seconds, params["seconds"])
        time.sleep(seconds)
        return logits


class Hangs(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        while True:
            pass


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with vllm_serve(request, is_async=request.param, variables=VARIABLES) as served:
        yield served


@pytest.fixture
def url(served: tuple[str, Server]) -> str:
    return served[0]


def late(seconds: float = LATE, first: int | None = None, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    """Return the body of a request with `Late`."""
    params = {"seconds": seconds, "first": first}
    return plain(tokens, custom_logit_processor=json.loads(Late.to_str()), custom_params=params, **fields)


def plain(tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    fixed = {"model": str(default_model_folder()), "ignore_eos": True, "return_token_ids": True, "max_tokens": tokens}
    return {"prompt": "The quick brown fox", "temperature": 0, **fixed, **fields}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=600)


def answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[tuple[list[int], str, list[float]]]:
    """Run requests at the same time, and return the tokens of each choice, its end and its log-probabilities."""
    with ThreadPoolExecutor(max_workers=len(bodies)) as pool:
        responses = [*pool.map(partial(post, url), bodies)]
    for response in responses:
        assert response.status_code == 200, response.text
    choices = [choice for response in responses for choice in response.json()["choices"]]
    return [(each["token_ids"], each["finish_reason"], _logprobs(each)) for each in choices]


def _logprobs(choice: dict[str, Any]) -> list[float]:
    return choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []


def about(found: list[tuple[list[int], str, list[float]]]) -> list[Any]:
    """Return answers that are equal to ones with other rounding errors: those of another batch composition."""
    return [(tokens, end, pytest.approx(logprobs, abs=0.01)) for tokens, end, logprobs in found]


def num_deferred(url: str) -> float:
    """Return the number of calls that were deferred so far, which engines show after a second."""
    time.sleep(1.5)
    return read_metrics(url, KEYS[0])("deferred_calls_total")


VARIANTS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 5, "logit_bias": {"50": 2.0}},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 2, "prompt": "Once upon a time"},
    {"temperature": 0.8, "seed": 3, "n": 2, "prompt": "In the beginning"},
    {"structured_outputs": {"regex": "[a-z ]{60}"}, "prompt": "The moon is"},
    {"prompt_logprobs": 1, "min_p": 0.1, "prompt": "My favourite"},
]
"""Their prompts fit into one step together: on a CPU, vLLM fails on parts of a prompt that is sampled with a seed."""


@pytest.mark.mode("vLLM", "V1 on one GPU, late calls sit out", "the real engine, 0.32.0")
def test_tokens_are_those_of_an_undisturbed_run(url: str) -> None:
    """Requests without processors are seeded as well. What a step discards is in no answer."""
    others = [plain(prompt="My favourite colour"), plain(temperature=1.0, seed=5)]
    undisturbed = about(answers(url, [*(late(0.0, **each) for each in VARIANTS), *others]))
    before = num_deferred(url)
    assert answers(url, [*(late(**each) for each in VARIANTS), *others]) == undisturbed
    assert num_deferred(url) > before


def test_long_prompts(url: str) -> None:
    """They are computed in chunks, and the second time vLLM takes the start from its cache."""
    bodies = [late(prompt=[*range(500, 650)], own=number) for number in range(2)]
    undisturbed = answers(url, [{**each, "custom_params": {"seconds": 0.0}} for each in bodies])
    before = num_deferred(url)
    with others_running(url):
        for _ in range(2):
            assert answers(url, bodies) == undisturbed
    assert num_deferred(url) > before


def test_preempted_requests(url: str) -> None:
    """Each needs a second block of the cache while all run."""
    before, deferred = preemptions(url), num_deferred(url)
    firsts = [*range(1000, 9000, 500)]
    bodies = [late(first=first, tokens=32, prompt=[first, *range(500, 609)]) for first in firsts]
    tokens = [answer for answer, _, _ in answers(url, bodies)]
    assert tokens == [[first + call for call in range(1, 33)] for first in firsts]
    assert preemptions(url) > before
    assert num_deferred(url) > deferred


def preemptions(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def stream(url: str, body: dict[str, Any]) -> Iterator[list[int]]:
    """Yield the tokens of each event of a stream."""
    request = partial(httpx.stream, "POST", f"{url}/v1/completions", headers=HEADERS, timeout=600)
    with request(json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    yield choice["token_ids"]


@contextmanager
def others_running(url: str) -> Iterator[list[float]]:
    """Run requests without processors all the time, and yield a list of the times at which they get their tokens.

    For a request that is alone, a step waits as long as its call takes.
    """
    arrived: list[float] = []
    is_over = threading.Event()
    has_begun = threading.Event()

    def run(tokens: int) -> None:
        while not is_over.is_set():
            for _ in stream(url, plain(tokens)):
                arrived.append(time.monotonic())  # seen while it grows
                has_begun.set()

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run, tokens) for tokens in (60, 100)]
        has_begun.wait(60)
        try:
            yield arrived
        finally:
            is_over.set()
        for each in running:
            each.result()


def test_other_requests_do_not_wait(url: str) -> None:
    """They get several tokens during each late call, for which an engine that waits would compute one."""
    events, times = [], []
    with others_running(url) as arrived:
        for tokens in stream(url, late(seconds=2.0, first=1000)):
            events.append(tokens)
            times.append(time.monotonic())
    assert events == [[1000 + call] for call in range(1, TOKENS + 1)]
    second_half = times[TOKENS // 2 :]  # the first calls use up what steps wait for in any case
    late_calls = sum(after - before > 1.5 for before, after in pairwise(second_half))
    assert late_calls >= 3
    assert sum(second_half[0] < at < second_half[-1] for at in arrived) > 6 * late_calls


def test_request_that_is_aborted_while_it_sits_out(url: str) -> None:
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=late(seconds=3.0), headers=HEADERS, timeout=4.0)
    assert answers(url, [late(0.0, first=1000)]) == [([1000 + call for call in range(1, TOKENS + 1)], "length", [])]


def test_call_that_hangs_ends_its_request(url: str) -> None:
    """Its sandbox ends it. The others go on with the same tokens."""
    undisturbed = answers(url, [plain(tokens=64)])
    with ThreadPoolExecutor() as pool, others_running(url):
        hanging = pool.submit(post, url, plain(custom_logit_processor=json.loads(Hangs.to_str())))
        while not hanging.done():
            assert answers(url, [plain(tokens=64)]) == undisturbed
    assert hanging.result().status_code == 400
    assert "processor Hangs" in hanging.result().text
    assert "is too slow: steps have waited" not in hanging.result().text
