"""Sandboxes that wait for a processor, so that a new one need not wait for a sandbox."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

from .sandbox import Sandbox
from .zygote_process import ZygoteError

NUM_SPARES = 2
"""For a server: two requests with new processors may come at the same time."""

PAUSE = 0.2
"""Seconds between the use of a spare sandbox and the start of the next: who took it needs the processor's cores now."""


class SpareSandboxes:
    """Keeps some started. Safe to use from several threads.

    Args:
        start: starts a sandbox, or raises `ZygoteError` or `OSError`.
        count: how many are kept; 0: none, and no thread is started.
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
        """A sandbox that lives: a spare one, or else one that is started now.

        Raises:
            ZygoteError, OSError: as `start`.
        """
        while (spare := self._pop()) is not None:
            self._missing.set()
            if spare.check():
                return spare
            spare.close()
        return self._start()

    def close(self) -> None:
        """End them, and start no more."""
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
        while self._missing.wait() and not self._closed.is_set():
            self._missing.clear()
            # What is in the way of a spare one is told to the first who needs a sandbox.
            with contextlib.suppress(ZygoteError, OSError):
                while len(self._spares) < self._count and not self._closed.is_set():
                    self._spares.append(self._start())
            self._closed.wait(PAUSE)
