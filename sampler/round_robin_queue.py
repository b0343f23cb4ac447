"""A queue whose tenants take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueueFull(Exception):
    """A tenant has as many waiting items as it may have."""


class RoundRobinQueue(Generic[T]):
    """Waiting items by tenant, taken round robin.

    A tenant's first item waits for one item of each other tenant at most.

    Not thread-safe: the owner holds its lock.

    Args:
        max_per_tenant: most waiting items of a tenant.
    """

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        # In the order of their turns; no tenant without items.
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, item: T) -> None:
        """Add an item behind the others of its tenant.

        Raises:
            TenantQueueFull: too many items of the tenant wait.
        """
        items = self._waiting.get(tenant, ())
        if len(items) >= self._max_per_tenant:
            raise TenantQueueFull
        self._waiting.setdefault(tenant, deque()).append(item)

    def get(self, may_take: Callable[[str], bool] = lambda tenant: True) -> tuple[str, T] | None:
        """Remove and return the next item with its tenant; None if there is none.

        Args:
            may_take: returns False for tenants to pass over, which keep their turn.
        """
        tenant = next(filter(may_take, self._waiting), None)
        if tenant is None:
            return None
        items = self._waiting[tenant]
        item = items.popleft()
        self._waiting.move_to_end(tenant)
        if not items:
            del self._waiting[tenant]
        return tenant, item

    def remove(self, tenant: str, item: T) -> bool:
        """Remove a waiting item. Returns False if it does not wait anymore."""
        items = self._waiting.get(tenant, deque[T]())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[tenant]
        return True
