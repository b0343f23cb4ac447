"""The stream of a request's chunks, from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from .messages import GenerationChunk


class GenerationStream:
    """An asynchronous iterator over the chunks of a request, with its `n` continuations interleaved.

    It ends when each continuation has its finish reason. To stop earlier, call `aclose()`: that cancels the request,
    which frees its rows within a step.

    Args:
        n: number of continuations.
        cancel: cancels the request.
    """

    def __init__(self, n: int, cancel: Callable[[], None]) -> None:
        self._unfinished = n
        self._cancel = cancel
        self._chunks: asyncio.Queue[GenerationChunk] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        while self._unfinished:
            chunk = await self._chunks.get()
            if chunk.finish_reason is not None:
                self._unfinished -= 1
            yield chunk

    async def aclose(self) -> None:
        """Cancel the request, unless it has finished."""
        if self._unfinished:
            self._cancel()

    def _put(self, chunks: list[GenerationChunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    @staticmethod
    def deliver(delivery: Iterable[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
        """Give streams their chunks, on any thread. Each event loop is woken up once for all of its streams."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[GenerationStream, list[GenerationChunk]]]] = {}
        for stream, chunks in delivery:
            by_loop.setdefault(stream._loop, []).append((stream, chunks))
        for loop, part in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put_all, part)


def _put_all(delivery: list[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
    for stream, chunks in delivery:
        stream._put(chunks)
