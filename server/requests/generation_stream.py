"""The chunks of one request, on their way from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from .messages import GenerationChunk


class GenerationStream:
    """The chunks of one request, of all its `n` continuations interleaved, until each has its finish reason.

    Leave it early with `aclose()`: that cancels the request and frees its rows within a step.

    Args:
        n: number of continuations.
        cancel: ends the request.
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
        """Cancel what still runs. Harmless at the end."""
        if self._unfinished:
            self._cancel()

    def _put(self, chunks: list[GenerationChunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    @staticmethod
    def deliver(gained: Iterable[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
        """Give streams their chunks, on any thread: what many gained in a step wakes their event loop up once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[GenerationStream, list[GenerationChunk]]]] = {}
        for stream, chunks in gained:
            by_loop.setdefault(stream._loop, []).append((stream, chunks))
        for loop, of_loop in by_loop.items():
            with contextlib.suppress(RuntimeError):  # it is closed: nobody listens any more
                loop.call_soon_threadsafe(_put_all, of_loop)


def _put_all(gained: list[tuple[GenerationStream, list[GenerationChunk]]]) -> None:
    for stream, chunks in gained:
        stream._put(chunks)
