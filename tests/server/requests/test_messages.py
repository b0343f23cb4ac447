from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.requests.messages import (
    BeamSearch,
    Continuation,
    FinishReason,
    GenerationChunk,
    GenerationStream,
    TokenLogprobs,
    beam_search_of,
    best_continuations,
)


@dataclass(frozen=True)
class Fields:
    n: int = 1
    num_beams: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: Any = False


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        (Fields(), None),
        (Fields(n=3), None),
        (Fields(n=3, num_beams=1), None),
        (Fields(n=3, use_beam_search=True), 3),
        (Fields(use_beam_search=True), 1),
        (Fields(use_beam_search=True, num_beams=1), 1),
        (Fields(n=2, num_beams=4), 4),
        (Fields(n=2, num_beams=4, use_beam_search=True), 4),
    ],
)
def test_fields_that_select_beam_search(fields: Fields, width: int | None) -> None:
    search = beam_search_of(fields)
    assert (search and search.width) == width


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (Fields(n=5, num_beams=4), "n"),
        (Fields(num_beams=0), "num_beams"),
        (Fields(num_beams=2, length_penalty=math.nan), "length_penalty"),
        (Fields(num_beams=2, length_penalty=10.5), "length_penalty"),
        (Fields(num_beams=2, early_stopping="always"), "early_stopping"),
        (Fields(length_penalty=2.0), "length_penalty"),
        (Fields(early_stopping=True), "early_stopping"),
        (Fields(num_beams=1, early_stopping="never"), "early_stopping"),
    ],
)
def test_invalid_fields_are_refused(fields: Fields, name: str) -> None:
    with pytest.raises(InvalidSamplingParams) as refused:
        beam_search_of(fields)
    assert refused.value.field == name


def test_extreme_length_penalties_give_finite_scores() -> None:
    for penalty in (-10, 10):
        score: Callable[[float, int], float] = BeamSearch(1, penalty).score
        assert math.isfinite(score(-1e6, 1_000_000))


def continuation(index: int, *logprobs: float, kind: str = "stop") -> Continuation:
    records = [TokenLogprobs(7, logprob, 1) for logprob in logprobs]
    reason = FinishReason("abort" if kind == "abort" else "stop")
    return Continuation(index, prompt=0, logprobs=records, finish_reason=reason)


def best(n: int, *continuations: Continuation) -> list[int]:
    return [each.index for each in best_continuations(continuations, n)]


def test_ranked_by_mean_logprob() -> None:
    short, long, worse = continuation(0, -2.0), continuation(1, -1.0, -1.0, -1.0), continuation(2, -1.5)
    assert best(3, short, long, worse) == [1, 2, 0]
    assert best(1, short, long, worse) == [1]


def test_ties_keep_their_order() -> None:
    assert best(2, continuation(0, -1.0), continuation(1, -0.5, -1.5), continuation(2, -1.0)) == [0, 1]


def test_aborted_and_empty_continuations_come_last() -> None:
    cancelled = continuation(0, -0.1, kind="abort")
    assert best(4, cancelled, continuation(1), continuation(2, float("-inf")), continuation(3, -9.0)) == [3, 1, 2, 0]


def chunk(text: str, *, last: bool = False) -> GenerationChunk:
    reason = FinishReason("length") if last else None
    return GenerationChunk(
        index=0, text=text, token_ids=[1], finish_reason=reason, prompt_tokens=1, completion_tokens=1
    )


def stream() -> GenerationStream:
    return GenerationStream(1, lambda: None)


async def texts(of: GenerationStream) -> list[str]:
    return [each.text async for each in of]


async def deliver_twice() -> None:
    loop = asyncio.get_running_loop()
    first, second = stream(), stream()
    with mock.patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as wake_up:
        GenerationStream.deliver([(first, [chunk("a")]), (second, [chunk("x", last=True)])])
        GenerationStream.deliver([(first, [chunk("b"), chunk("c", last=True)])])
    assert wake_up.call_count == 2
    assert await texts(first) == ["a", "b", "c"]
    assert await texts(second) == ["x"]


def test_each_delivery_wakes_the_event_loop_once() -> None:
    asyncio.run(deliver_twice())


async def make_stream() -> GenerationStream:
    return stream()


async def deliver_to_both(closed: GenerationStream) -> list[str]:
    other = stream()
    GenerationStream.deliver([(closed, [chunk("a")]), (other, [chunk("b", last=True)])])
    return await texts(other)


def test_closed_event_loop_does_not_block_other_streams() -> None:
    closed = asyncio.run(make_stream())
    assert asyncio.run(deliver_to_both(closed)) == ["b"]
