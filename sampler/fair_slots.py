"""Objects that one thread at a time may use, whose tenants take turns."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from .client_context import current_disconnect
from .round_robin_queue import RoundRobinQueue

T = TypeVar("T")


class FairSlots(Generic[T]):
    """Slots for threads that wait. Methods may be called from any thread.

    Guarantees:
    * A tenant uses all slots but one at most, if there are several: the first use of another tenant begins at once.
    * The first free slot is used, so that the later ones are only needed for several uses at a time.

    Args:
        slots: the objects.
        max_waiting: most waiting threads of a tenant.
    """

    def __init__(self, slots: Sequence[T], max_waiting: int) -> None:
        self._slots = slots
        self._free = set(range(len(slots)))
        self._using: Counter[str] = Counter()
        self._waiting: RoundRobinQueue[_SlotWaiter] = RoundRobinQueue(max_waiting)
        self._lock = threading.Lock()

    @property
    def num_in_use(self) -> int:
        """Slots that are in use."""
        with self._lock:
            return self._using.total()

    @property
    def num_waiting(self) -> int:
        """Threads that wait for a slot."""
        with self._lock:
            return len(self._waiting)

    @contextmanager
    def use(self, tenant: str, timeout: float) -> Iterator[T]:
        """Wait for a slot, and use it in the block.

        Args:
            tenant: who uses it.
            timeout: most seconds to wait.

        Raises:
            TenantQueueFull: too many threads of the tenant wait.
            TimeoutError: no slot became free in time, or before the client disconnected, see `current_disconnect`.
        """
        index = self._acquire(tenant, timeout)
        try:
            yield self._slots[index]
        finally:
            with self._lock:
                self._free.add(index)
                self._using[tenant] -= 1
                self._grant()

    def _acquire(self, tenant: str, timeout: float) -> int:
        waiter = _SlotWaiter()
        with self._lock:
            self._waiting.put(tenant, waiter)
            self._grant()
        if (disconnect := current_disconnect.get()) is not None:
            disconnect.call_when_notified(waiter.over.set)
        waiter.over.wait(timeout)
        with self._lock:
            if waiter.slot is None:
                self._waiting.remove(tenant, waiter)
                raise TimeoutError
            return waiter.slot

    def _grant(self) -> None:
        """Give the free slots to those whose turn it is."""
        while self._free and (taken := self._waiting.get(self._may_take)) is not None:
            tenant, waiter = taken
            waiter.slot = min(self._free)
            self._free.remove(waiter.slot)
            self._using[tenant] += 1
            waiter.over.set()

    def _may_take(self, tenant: str) -> bool:
        return self._using[tenant] < max(1, len(self._slots) - 1)


class _SlotWaiter:
    """A thread that waits.

    Attributes:
        over: set once it has a slot, or its client has disconnected.
        slot: its index; None before.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.slot: int | None = None
