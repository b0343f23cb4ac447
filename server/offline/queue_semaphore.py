"""Places in the engine's queue, for callers that would rather wait than be refused."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class _Waiter:
    places: int
    loop: asyncio.AbstractEventLoop
    entered: asyncio.Future[None]


class QueueSemaphore:
    """A semaphore that gives out several places at once, first come first served.

    Works across event loops, as `asyncio.Semaphore` does not: a program may call `asyncio.run` more than once on one
    engine, or have a loop in each of its threads.

    Args:
        places: how many there are.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._free = places
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    async def enter(self, places: int) -> None:
        """Take places, at most as many as there are. Waits until they are free."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(places, loop, loop.create_future())
        with self._lock:
            self._waiters.append(waiter)
            self._admit()
        try:
            await waiter.entered
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def leave(self, places: int) -> None:
        """Give places back. On any thread."""
        with self._lock:
            self._free += places
            self._admit()

    def _admit(self) -> None:
        while self._waiters and self._waiters[0].places <= self._free:
            waiter = self._waiters.popleft()
            self._free -= waiter.places
            waiter.loop.call_soon_threadsafe(_settle, waiter.entered)

    def _give_up(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:  # its places came while it was cancelled
                self._free += waiter.places
            self._admit()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
