"""The client for which a thread or task works: its tenant, and whether it has disconnected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""Tenant for whom this thread or task works, where no argument says it."""


@contextmanager
def on_behalf_of(tenant: str) -> Iterator[None]:
    """Set `current_tenant` within the block."""
    token = current_tenant.set(tenant)
    try:
        yield
    finally:
        current_tenant.reset(token)


class Disconnect:
    """Wakes up the threads that wait for a client's work when it disconnects. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_happened = False
        self._wake_ups: list[Callable[[], object]] = []

    def notify(self) -> None:
        """Wake up the threads that wait now, and those that begin to wait later."""
        with self._lock:
            self._has_happened = True
            wake_ups, self._wake_ups = self._wake_ups, []
        for wake_up in wake_ups:
            wake_up()

    def call_when_notified(self, wake_up: Callable[[], object]) -> None:
        """Call a function when the client disconnects; at once if it has."""
        with self._lock:
            if not self._has_happened:
                self._wake_ups.append(wake_up)
                return
        wake_up()


current_disconnect: ContextVar[Disconnect | None] = ContextVar("current_disconnect", default=None)
"""Disconnect of the client for which this thread or task works."""
