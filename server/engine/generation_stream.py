"""The chunks of one request, on their way from the engine's thread to a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

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

    def deliver(self, chunks: list[GenerationChunk]) -> None:
        """Take chunks, on any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._put, chunks)

    def _put(self, chunks: list[GenerationChunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)
