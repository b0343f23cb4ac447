"""Memory of the request bodies that are being read or wait, bounded per tenant and in all."""

from __future__ import annotations

import threading
from collections import Counter

from logitship.server.refusals import QueueFull

BYTES_PER_ELEMENT = 64
"""Memory of a key or value of a decoded body, on top of its text: an integer in a list takes 40 bytes, an empty list or
object 64."""


class QueuedBytes:
    """Counts the bytes of bodies. Methods may be called from any thread.

    Args:
        limit: most bytes of all bodies.
        share: most bytes of one tenant's bodies.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._limit = limit
        self._share = share
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes of all bodies that are counted now."""
        with self._lock:
            return self._used.total()

    def open(self, tenant: str) -> QueuedBody:
        """Start to count a tenant's body, which has no bytes yet and one holder."""
        return QueuedBody(self, tenant)

    def take(self, tenant: str, size: int) -> None:
        """Count bytes of a tenant.

        Raises:
            QueueFull: there is no room for them.
        """
        with self._lock:
            used, own = self._used.total() + size, self._used[tenant] + size
            if own > self._share:
                raise QueueFull(
                    f"your requests that wait would take {own} bytes, this server holds at most {self._share} of a "
                    "client (--max-queued-bytes): try again when some of them have started"
                )
            if used > self._limit:
                raise QueueFull(
                    f"the requests that wait would take {used} bytes, this server holds at most {self._limit} "
                    "(--max-queued-bytes): try again later"
                )
            self._used[tenant] = own

    def give_back(self, tenant: str, size: int) -> None:
        """Stop counting bytes of a tenant."""
        with self._lock:
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]


class QueuedBody:
    """The bytes of one body, which are counted until its last holder has released it.

    The route holds it while it reads and parses the body. Each of the engine's requests holds it until it starts.

    Attributes:
        size: bytes that are counted for it: an estimate of its memory.
        depth: how deep it is nested; None if that is unknown.
    """

    def __init__(self, queued: QueuedBytes, tenant: str) -> None:
        self._queued = queued
        self._tenant = tenant
        self._holders = 1
        self._lock = threading.Lock()
        self.size = 0
        self.depth: int | None = None

    def add(self, size: int) -> None:
        """Count further bytes.

        Raises:
            QueueFull: there is no room for them.
        """
        self._queued.take(self._tenant, size)
        self.size += size

    def hold(self) -> QueuedBody:
        """Add a holder."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._queued.give_back(self._tenant, self.size)
