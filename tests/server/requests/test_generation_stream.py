from __future__ import annotations

import asyncio
from unittest import mock

from logitship.server.requests.generation_stream import Continuation, GenerationStream, best_continuations
from logitship.server.requests.messages import FinishReason, GenerationChunk, TokenLogprobs


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
