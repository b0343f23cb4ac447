"""`n` continuations: the prompt is computed once, and each equals a request of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.active_requests import continuation_seed
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model.model_runner import ModelRunner
from logitship.server.refusals import BadRequest, QueueFull
from logitship.server.requests.messages import (
    AttachedProcessor,
    CallableRequest,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    ProcessorRequest,
    TokenLogprobs,
)

BuildEngine = Callable[..., AsyncEngine]

PROMPT = [4 + (11 * k) % 250 for k in range(60)]

COUNTS = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class Counts(CustomLogitProcessor):
    '''Boosts a token that depends on counts in its state and parameters, and on the history.'''
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            req = params["__req__"]
            calls = req.state["calls"] = req.state.get("calls", 0) + 1
            params["seen"].append(len(req.output_ids))
            assert calls == len(req.output_ids) + 1
            assert params["seen"] == list(range(calls))
            row[(31 * calls + 17 * len(params["seen"]) + sum(req.output_ids)) % req.vocab_size] += 4.0
        return logits
""",
    "Counts",
)
FAILS_FIRST = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class FailsFirst(CustomLogitProcessor):
    '''Its first call fails.'''
    calls = 0
    def __call__(self, logits, custom_param_list=None):
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return logits
""",
    "FailsFirst",
)


class CountsCalls:
    """A callable in vLLM V0's convention that boosts a token by its number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert self.calls == len(output_token_ids)
        self.calls += 1
        logits[(7 * self.calls) % len(logits)] += 4.0
        return logits


def processors_of(string: ProcessorString, **params: Any) -> tuple[AttachedProcessor, ...]:
    return (ProcessorRequest(string, params),)


def request(
    rid: str,
    prompt: list[int] = PROMPT,
    *,
    n: int = 1,
    best_of: int | None = None,
    processors: tuple[AttachedProcessor, ...] = (),
    **params: Any,
) -> GenerationRequest:
    sampling_params = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | params))
    return GenerationRequest(
        rid=rid, prompt_token_ids=prompt, sampling_params=sampling_params, processors=processors, n=n, best_of=best_of
    )


@dataclass
class Result:
    """One continuation."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunks: list[GenerationChunk] = field(default_factory=list)

    @property
    def cached_tokens(self) -> set[int]:
        return {chunk.cached_tokens for chunk in self.chunks}

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.chunks[-1].finish_reason
        assert reason is not None
        return reason


async def generate(engine: AsyncEngine, wanted: GenerationRequest) -> list[Result]:
    results = [Result() for _ in range(wanted.num_sequences)]
    async for chunk in await engine.submit(wanted):
        result = results[chunk.index]
        result.token_ids += chunk.token_ids
        result.logprobs += chunk.logprobs
        result.prompt_logprobs += chunk.prompt_logprobs
        result.chunks.append(chunk)
    return results


async def singles(engine: AsyncEngine, wanted: GenerationRequest, seed: int) -> list[Result]:
    """Generate the same continuations, each as a request of its own."""
    results = []
    for index in range(wanted.n):
        values = {name: getattr(wanted.sampling_params, name) for name in ("max_tokens", "temperature", "top_k")}
        single = request(
            f"single{index}",
            wanted.prompt_token_ids,
            processors=wanted.processors,
            seed=continuation_seed(seed, index),
            **values,
        )
        results += await generate(engine, single)
    return results


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


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
    results = run(generate(engine, request("r", n=5, max_tokens=max_tokens)))
    assert prompt_tokens.take() == 60 + 4
    assert [len(result.token_ids) for result in results] == [max_tokens] * 5
    assert [result.cached_tokens for result in results] == [{0}, *[{59}] * 4]


def test_batched_prompts_are_shared_separately(make_engine: BuildEngine, prompt_tokens: PromptTokens) -> None:
    engine = make_engine(max_num_seqs=8, prefix_cache_bytes=0)
    other = PROMPT[::-1]
    wanted = [request("b_0", n=2, seed=1), request("b_1", other, n=2, seed=2)]

    async def both() -> list[list[Result]]:
        expected = [await singles(engine, one, seed) for one, seed in zip(wanted, (1, 2), strict=True)]
        prompt_tokens.take()
        results = await asyncio.gather(*(generate(engine, one) for one in wanted))
        assert prompt_tokens.take() == 2 * (60 + 1)
        return [*expected, *results]

    *expected, first, second = run(both())
    assert [[result.token_ids for result in each] for each in (first, second)] == [
        [result.token_ids for result in each] for each in expected
    ]


def test_continuation_does_not_depend_on_n(make_engine: BuildEngine) -> None:
    rng = random.Random(0)
    engine = make_engine(max_num_seqs=3)

    async def compare() -> None:
        for _ in range(12):
            seed = rng.choice([0, 7, (1 << 64) - 1, rng.getrandbits(64)])
            n = rng.randint(1, 6)
            prompt = [rng.randrange(4, 260) for _ in range(rng.choice([1, 2, 30]))]
            params = {"temperature": rng.choice([0.7, 1.3]), "top_k": rng.choice([-1, 20]), "max_tokens": 6}
            wanted = request("r", prompt, n=n, seed=seed, **params)
            results = await generate(engine, wanted)
            assert [each.token_ids for each in results] == [
                each.token_ids for each in await singles(engine, wanted, seed)
            ]

    run(compare())


def test_continuation_seeds() -> None:
    seeds = [continuation_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 64 for seed in seeds)


STATEFUL = [
    processors_of(COUNTS, seen=[]),
    processors_of(InstalledProcessor("no_repeat_ngram"), ngram_size=1, window_size=50),
    processors_of(InstalledProcessor("thinking_budget"), thinking_budget=3),
    processors_of(InstalledProcessor("gen_length"), boost_factor=0.5),
    (CallableRequest(CountsCalls),),
    (CallableRequest(CountsCalls()),),
]


@pytest.mark.parametrize("processors", STATEFUL)
def test_continuations_have_separate_state(make_engine: BuildEngine, processors: tuple[AttachedProcessor, ...]) -> None:
    engine = make_engine(max_num_seqs=3, logits_processor_pattern=".*")
    wanted = request("r", n=5, seed=3, max_tokens=12, processors=processors)

    async def both() -> tuple[list[Result], list[Result]]:
        return await generate(engine, wanted), await singles(engine, wanted, 3)

    results, expected = run(both())
    assert [result.finish_reason for result in results] == [FinishReason("length")] * 5
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert len({tuple(result.token_ids) for result in results}) == 5


@pytest.mark.slow
def test_continuations_have_separate_state_in_a_sandbox(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=3, processor_isolation="sandbox")
    wanted = request("r", n=4, seed=3, processors=processors_of(COUNTS, seen=[]))

    async def both() -> tuple[list[Result], list[Result]]:
        return await generate(engine, wanted), await singles(engine, wanted, 3)

    results, expected = run(both())
    assert [result.finish_reason for result in results] == [FinishReason("length")] * 4
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


def test_continuations_have_equal_prompt_logprobs(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=4, chunked_prefill_size=16, enable_deterministic_inference=True)
    for max_tokens in (0, 3):
        for start in (0, 1, 30, 59):
            params = {"prompt_logprobs": 2, "prompt_logprobs_start": start, "max_tokens": max_tokens}
            results = run(generate(engine, request("r", n=3, **params)))
            first = results[0].prompt_logprobs
            assert [record.token_id for record in first] == PROMPT[start:]
            assert all(result.prompt_logprobs == first for result in results)
            assert all(not chunk.prompt_logprobs for result in results for chunk in result.chunks[1:])
            (single,) = run(generate(engine, request("s", **params)))
            assert single.prompt_logprobs == first


def test_late_continuation_copies_from_running_one(make_engine: BuildEngine, prompt_tokens: PromptTokens) -> None:
    engine = make_engine(max_num_seqs=2, chunked_prefill_size=16, enable_deterministic_inference=True)
    prompt_tokens.take()
    passes_before = prompt_tokens.passes

    def abort_second(passes: int) -> None:
        if passes == passes_before + 10:
            engine.abort("r_1")

    prompt_tokens.during = abort_second
    results = run(generate(engine, request("r", n=3, max_tokens=40, prompt_logprobs=0)))
    assert [result.finish_reason.kind for result in results] == ["length", "abort", "length"]
    assert prompt_tokens.take() == 60 + 2
    assert results[2].cached_tokens == {59}
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
    results = run(generate(engine, wanted))
    assert prompt_tokens.take() == 32 + 60 + 1
    assert [result.finish_reason.kind for result in results] == ["abort", "length", "length"]
    assert [result.token_ids for result in results[1:]] == [result.token_ids for result in expected[1:]]
    assert [result.cached_tokens for result in results] == [{0}, {0}, {59}]


def test_fault_of_one_continuation_keeps_the_shared_prompt(
    make_engine: BuildEngine, prompt_tokens: PromptTokens
) -> None:
    engine = make_engine()
    prompt_tokens.take()
    results = run(generate(engine, request("r", n=3, processors=processors_of(FAILS_FIRST))))
    assert [result.finish_reason.kind for result in results] == ["abort", "length", "length"]
    assert prompt_tokens.take() == 60 + 2


def test_best_of_generates_more_with_logprobs(make_engine: BuildEngine) -> None:
    engine = make_engine(enable_deterministic_inference=True)

    async def three() -> tuple[list[Result], list[Result], list[Result]]:
        return (
            await generate(engine, request("a", n=2, best_of=5, seed=9)),
            await generate(engine, request("b", n=5, seed=9, logprobs=0)),
            await generate(engine, request("c", n=2, best_of=2, seed=9)),
        )

    ranked, plain, as_many = run(three())
    assert [result.token_ids for result in ranked] == [result.token_ids for result in plain]
    assert [result.logprobs for result in ranked] == [result.logprobs for result in plain]
    assert [len(result.logprobs) for result in as_many] == [0, 0]


def test_best_of_limits(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=2, max_queued_requests=2)

    async def refused() -> None:
        with pytest.raises(BadRequest, match="not be smaller than n, which is 3") as refusal:
            await engine.submit(request("a", n=3, best_of=2))
        assert refusal.value.param == "best_of"
        with pytest.raises(QueueFull):
            await engine.submit(request("b", n=1, best_of=5))
        assert len(await generate(engine, request("c", n=1, best_of=4))) == 4

    run(refused())
