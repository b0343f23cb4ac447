from __future__ import annotations

import asyncio
from unittest import mock

from logitship.server.requests.generation_stream import GenerationStream
from logitship.server.requests.messages import FinishReason, GenerationChunk


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
