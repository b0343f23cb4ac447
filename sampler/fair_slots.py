"""Objects that one thread at a time may use, whose tenants take turns."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from .round_robin_queue import RoundRobinQueue

T = TypeVar("T")

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


class Departure:
    """Wakes up the threads that wait for a client, when it leaves. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_left = False
        self._wake_ups: list[Callable[[], object]] = []

    def notify(self) -> None:
        """Wake up the threads that wait now, and those that begin to wait later."""
        with self._lock:
            self._has_left = True
            wake_ups, self._wake_ups = self._wake_ups, []
        for wake_up in wake_ups:
            wake_up()

    def when_left(self, wake_up: Callable[[], object]) -> None:
        """Call a function when the client leaves; at once if it has left."""
        with self._lock:
            if not self._has_left:
                self._wake_ups.append(wake_up)
                return
        wake_up()


current_departure: ContextVar[Departure | None] = ContextVar("current_departure", default=None)
"""Departure of the client for which this thread or task works."""


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

    @contextmanager
    def use(self, tenant: str, timeout: float) -> Iterator[T]:
        """Wait for a slot, and use it in the block.

        Args:
            tenant: who uses it.
            timeout: most seconds to wait.

        Raises:
            TenantQueueFull: too many threads of the tenant wait.
            TimeoutError: no slot became free in time, or before the client of `current_departure` left.
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
        if (departure := current_departure.get()) is not None:
            departure.when_left(waiter.over.set)
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
        over: set once it has a slot, or its client has left.
        slot: its index; None before.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.slot: int | None = None
