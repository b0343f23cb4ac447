"""A pool of sandboxes that are started before they are needed, which spares a new processor the wait for a fork."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from .sandbox import Sandbox
from .zygote_process import ZygoteError

NUM_SPARES = 2
"""Default of a server: two requests with new processors may arrive at the same time."""

PAUSE = 0.2
"""Seconds between taking a spare sandbox and starting the next, because the one taken needs the CPU now."""


class SpareSandboxes:
    """A pool of started sandboxes. Thread-safe.

    Args:
        start: starts a sandbox; raises `ZygoteError` or `OSError`.
        count: size of the pool. If 0, no thread is started.
    """

    def __init__(self, start: Callable[[], Sandbox], count: int) -> None:
        self._start = start
        self._count = count
        self._spares: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._missing = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._refill, name="logitship-spares", daemon=True)
        if count:
            self._missing.set()
            self._thread.start()

    def take(self) -> Sandbox:
        """Return a live sandbox from the pool, or start one.

        Raises:
            ZygoteError, OSError: raised by `start`.
        """
        while (spare := self._pop()) is not None:
            self._missing.set()
            if spare.is_running:
                return spare
            spare.close()
        return self._start()

    def close(self) -> None:
        """Close the pool's sandboxes, and start no more."""
        self._closed.set()
        self._missing.set()
        if self._count:
            self._thread.join()
        while (spare := self._pop()) is not None:
            spare.close()

    def _pop(self) -> Sandbox | None:
        with self._lock:
            return self._spares.popleft() if self._spares else None

    def _refill(self) -> None:
        pause = 0.0  # the pool is filled at once at the start
        while self._missing.wait() and not self._closed.wait(pause):
            self._missing.clear()
            pause = PAUSE
            # An error that lasts is raised by the next `take`.
            with contextlib.suppress(ZygoteError, OSError):
                while len(self._spares) < self._count and not self._closed.is_set():
                    self._spares.append(self._start())
