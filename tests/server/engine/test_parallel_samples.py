"""`n` continuations: the prompt is computed once, and each equals a request of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from logitship.server.engine.active_requests import continuation_seed
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model.model_runner import ModelRunner
from logitship.server.refusals import BadRequest, QueueFull
from logitship.server.requests.messages import (
    CallableRequest,
    FinishReason,
    GenerationRequest,
)
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import BuildEngine, Output, generate_all, installed
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped, shipped_by_row

PROMPT = [4 + (11 * k) % 250 for k in range(60)]

COUNTS = shipped_by_row(
    "Counts",
    """
    # Boost a token that depends on counts in the state and the parameters, and on the history.
    calls = req.state["calls"] = req.state.get("calls", 0) + 1
    params["seen"].append(len(req.output_ids))
    assert calls == len(req.output_ids) + 1
    assert params["seen"] == list(range(calls))
    row[(31 * calls + 17 * len(params["seen"]) + sum(req.output_ids)) % req.vocab_size] += 4.0
    """,
)
FAILS_FIRST = shipped(
    "FailsFirst",
    """
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls == 1:
        raise ValueError("not yet")
    return logits
    """,
)
request = partial(any_request, prompt=PROMPT)


class CountsCalls:
    """A callable in vLLM V0's convention that boosts a token by its number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert self.calls == len(output_token_ids)
        self.calls += 1
        logits[(7 * self.calls) % len(logits)] += 4.0
        return logits


def cached_tokens(output: Output) -> set[int]:
    return {chunk.cached_tokens for chunk in output.chunks}


async def singles(engine: AsyncEngine, wanted: GenerationRequest, seed: int) -> list[Output]:
    """Generate the same continuations, each as a request of its own."""
    results = []
    for index in range(wanted.n):
        values = {name: getattr(wanted.sampling_params, name) for name in ("max_tokens", "temperature", "top_k")}
        single = request(
            f"single{index}",
            prompt=wanted.prompt_token_ids,
            processors=wanted.processors,
            seed=continuation_seed(seed, index),
            **values,
        )
        results += await generate_all(engine, single)
    return results


class PromptTokens:
    """Counts the prompt tokens that the model computes, with a hook in the forward pass.

    Attributes:
        count: prompt tokens since the last `take`.
        passes: forward passes so far.
        during: called in each forward pass with the number of passes before it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.passes = 0
        self.during: Callable[[int], None] = lambda passes: None
        forward = ModelRunner.forward

        def counting(runner: ModelRunner, decode: list[Any], prefill: list[Any], *others: Any) -> Any:
            self.during(self.passes)
            self.passes += 1
            self.count += sum(len(chunk.token_ids) for chunk in prefill)
            return forward(runner, decode, prefill, *others)

        monkeypatch.setattr(ModelRunner, "forward", counting)

    def take(self) -> int:
        """Return the prompt tokens since the last call."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> PromptTokens:
    return PromptTokens(monkeypatch)


@pytest.mark.parametrize("chunk_size", [7, 59, 60, 256])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_is_computed_once(
    make_engine: BuildEngine, prompt_tokens: PromptTokens, chunk_size: int, max_tokens: int
) -> None:
    engine = make_engine(max_num_seqs=8, chunked_prefill_size=chunk_size)
    prompt_tokens.take()
    results = run(generate_all(engine, request("r", n=5, max_tokens=max_tokens)))
    assert prompt_tokens.take() == 60 + 4
    assert [len(result.token_ids) for result in results] == [max_tokens] * 5
    assert [cached_tokens(result) for result in results] == [{0}, *[{59}] * 4]


def test_batched_prompts_are_shared_separately(make_engine: BuildEngine, prompt_tokens: PromptTokens) -> None:
    engine = make_engine(max_num_seqs=8, prefix_cache_bytes=0)
    other = PROMPT[::-1]
    wanted = [request("b_0", n=2, seed=1), request("b_1", prompt=other, n=2, seed=2)]

    async def both() -> list[list[Output]]:
        return await asyncio.gather(*(generate_all(engine, one) for one in wanted))

    expected = [run(singles(engine, one, seed)) for one, seed in zip(wanted, (1, 2), strict=True)]
    prompt_tokens.take()
    results = run(both())
    assert prompt_tokens.take() == 2 * (60 + 1)
    assert [[output.token_ids for output in each] for each in results] == [
        [output.token_ids for output in each] for each in expected
    ]


@pytest.mark.slow
def test_continuation_does_not_depend_on_n(make_engine: BuildEngine) -> None:
    rng = random.Random(0)
    engine = make_engine(max_num_seqs=3)
    for _ in range(12):
        seed = rng.choice([0, 7, (1 << 64) - 1, rng.getrandbits(64)])
        n = rng.randint(1, 6)
        prompt = [rng.randrange(4, 260) for _ in range(rng.choice([1, 2, 30]))]
        params = {"temperature": rng.choice([0.7, 1.3]), "top_k": rng.choice([-1, 20]), "max_tokens": 6}
        wanted = request("r", prompt=prompt, n=n, seed=seed, **params)
        results, expected = run(generate_all(engine, wanted)), run(singles(engine, wanted, seed))
        assert [each.token_ids for each in results] == [each.token_ids for each in expected]


def test_continuation_seeds() -> None:
    seeds = [continuation_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 64 for seed in seeds)


STATEFUL = [
    (COUNTS, {"seen": []}),
    installed("no_repeat_ngram", ngram_size=1, window_size=50),
    installed("thinking_budget", thinking_budget=3),
    installed("gen_length", boost_factor=0.5),
    CallableRequest(CountsCalls),
    CallableRequest(CountsCalls()),
]


@pytest.mark.slow
@pytest.mark.parametrize("processor", STATEFUL)
def test_continuations_have_separate_state(make_engine: BuildEngine, processor: Any) -> None:
    engine = make_engine(max_num_seqs=3, logits_processor_pattern=".*")
    wanted = request("r", n=5, seed=3, max_tokens=12, processors=[processor])
    results, expected = run(generate_all(engine, wanted)), run(singles(engine, wanted, 3))
    assert [result.finish_reason for result in results] == [FinishReason("length")] * 5
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert len({tuple(result.token_ids) for result in results}) == 5


@pytest.mark.slow
def test_continuations_have_separate_state_in_a_sandbox(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=3, processor_isolation="sandbox")
    wanted = request("r", n=4, seed=3, processors=[(COUNTS, {"seen": []})])
    results, expected = run(generate_all(engine, wanted)), run(singles(engine, wanted, 3))
    assert [result.finish_reason for result in results] == [FinishReason("length")] * 4
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


def test_continuations_have_equal_prompt_logprobs(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=4, chunked_prefill_size=16, enable_deterministic_inference=True)
    for max_tokens in (0, 3):
        for start in (0, 1, 30, 59):
            params = {"prompt_logprobs": 2, "prompt_logprobs_start": start, "max_tokens": max_tokens}
            results = run(generate_all(engine, request("r", n=3, **params)))
            first = results[0].prompt_logprobs
            assert [record.token_id for record in first] == PROMPT[start:]
            assert all(result.prompt_logprobs == first for result in results)
            assert all(not chunk.prompt_logprobs for result in results for chunk in result.chunks[1:])
            (single,) = run(generate_all(engine, request("s", **params)))
            assert single.prompt_logprobs == first


def test_late_continuation_copies_from_running_one(make_engine: BuildEngine, prompt_tokens: PromptTokens) -> None:
    engine = make_engine(max_num_seqs=2, chunked_prefill_size=16, enable_deterministic_inference=True)
    prompt_tokens.take()
    passes_before = prompt_tokens.passes

    def abort_second(passes: int) -> None:
        if passes == passes_before + 10:
            engine.abort("r_1")

    prompt_tokens.during = abort_second
    results = run(generate_all(engine, request("r", n=3, max_tokens=40, prompt_logprobs=0)))
    assert [result.finish_reason.kind for result in results] == ["length", "abort", "length"]
    assert prompt_tokens.take() == 60 + 2
    assert cached_tokens(results[2]) == {59}
    assert results[2].prompt_logprobs == results[0].prompt_logprobs


def test_next_continuation_takes_over_from_aborted_one(make_engine: BuildEngine, prompt_tokens: PromptTokens) -> None:
    engine = make_engine(chunked_prefill_size=16, prefix_cache_bytes=0)
    wanted = request("r", n=3, seed=5)
    expected = run(singles(engine, wanted, 5))
    prompt_tokens.take()
    passes_before = prompt_tokens.passes

    def abort_first(passes: int) -> None:
        if passes == passes_before + 1:  # the second of the prompt's four chunks
            engine.abort("r_0")

    prompt_tokens.during = abort_first
    results = run(generate_all(engine, wanted))
    assert prompt_tokens.take() == 32 + 60 + 1
    assert [result.finish_reason.kind for result in results] == ["abort", "length", "length"]
    assert [result.token_ids for result in results[1:]] == [result.token_ids for result in expected[1:]]
    assert [cached_tokens(result) for result in results] == [{0}, {0}, {59}]


def test_fault_of_one_continuation_keeps_the_shared_prompt(
    make_engine: BuildEngine, prompt_tokens: PromptTokens
) -> None:
    engine = make_engine()
    prompt_tokens.take()
    results = run(generate_all(engine, request("r", n=3, processors=[(FAILS_FIRST, None)])))
    assert [result.finish_reason.kind for result in results] == ["abort", "length", "length"]
    assert prompt_tokens.take() == 60 + 2


def test_best_of_generates_more_with_logprobs(make_engine: BuildEngine) -> None:
    engine = make_engine(enable_deterministic_inference=True)
    ranked = run(generate_all(engine, request("a", n=2, best_of=5, seed=9)))
    plain = run(generate_all(engine, request("b", n=5, seed=9, logprobs=0)))
    as_many = run(generate_all(engine, request("c", n=2, best_of=2, seed=9)))
    assert [result.token_ids for result in ranked] == [result.token_ids for result in plain]
    assert [result.logprobs for result in ranked] == [result.logprobs for result in plain]
    assert [len(result.logprobs) for result in as_many] == [0, 0]


async def test_best_of_limits(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=2, max_queued_requests=2)
    with pytest.raises(BadRequest, match="not be smaller than n, which is 3") as refusal:
        await engine.submit(request("a", n=3, best_of=2))
    assert refusal.value.param == "best_of"
    with pytest.raises(QueueFull):
        await engine.submit(request("b", n=1, best_of=5))
    assert len(await generate_all(engine, request("c", n=1, best_of=4))) == 4
