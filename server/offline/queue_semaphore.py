"""A semaphore for the engine's queue: callers wait for capacity instead of being refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiter:
    slots: int
    owner: object
    loop: asyncio.AbstractEventLoop
    acquired: asyncio.Future[bool]
    admitted: bool = False


class QueueSemaphore:
    """A FIFO semaphore whose callers acquire several slots at once.

    Unlike `asyncio.Semaphore`, it works across event loops: a program may call `asyncio.run` more than once with one
    engine, or have a loop in each of its threads.

    Args:
        slots: total number of slots.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._waiters: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    async def acquire(self, slots: int, owner: object = None) -> bool:
        """Wait for free slots, and take them.

        Args:
            slots: must not exceed the total.
            owner: identifies the call for `withdraw`.

        Returns:
            True; False, with no slots, if `withdraw` was called meanwhile.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(slots, owner, loop, loop.create_future())
        with self._lock:
            self._waiters.append(waiter)
            self._admit()
        try:
            return await waiter.acquired
        except asyncio.CancelledError:
            self._remove(waiter)
            raise

    def release(self, slots: int) -> None:
        """Return slots. Thread-safe."""
        with self._lock:
            self._free += slots
            self._admit()

    def withdraw(self, owner: object) -> None:
        """End the calls of `acquire` by this owner that wait. Thread-safe."""
        with self._lock:
            for waiter in [waiter for waiter in self._waiters if waiter.owner is owner]:
                self._waiters.remove(waiter)
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    waiter.loop.call_soon_threadsafe(_settle, waiter.acquired, False)
            self._admit()

    def _admit(self) -> None:
        while self._waiters and self._waiters[0].slots <= self._free:
            waiter = self._waiters.popleft()
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                waiter.loop.call_soon_threadsafe(_settle, waiter.acquired, True)
                waiter.admitted = True
                self._free -= waiter.slots

    def _remove(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter.admitted:  # while it was cancelled
                self._free += waiter.slots
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._admit()


def _settle(future: asyncio.Future[bool], acquired: bool) -> None:
    if not future.done():
        future.set_result(acquired)
