"""The sequences that wait for a slot, fair between tenants."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from logitship.server.requests.sequence import Sequence


class FairQueue:
    """First come, first served for each tenant. Between tenants, the one with the fewest slots is next.

    Iterates by tenant, then in order of arrival.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        """Return the number of sequences. Any thread."""
        return sum(map(len, list(self._queues.values())))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def extend(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences at the end."""
        for sequence in sequences:
            self._queues.setdefault(sequence.tenant, deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence.

        Raises:
            ValueError: it does not wait.
        """
        queue = self._queues.get(sequence.tenant, deque())
        queue.remove(sequence)
        if not queue:
            self._queues.pop(sequence.tenant, None)

    def first(self, slots: Counter[str]) -> Sequence | None:
        """Return the sequence that is next, or None.

        It is the first of the tenant that has the fewest slots, those that the sequence needs included. Of tenants with
        the same number it is the one that has waited longest since its queue was empty or it was last served.

        Args:
            slots: number of slots that each tenant has.
        """
        heads = [queue[0] for queue in self._queues.values()]
        return min(heads, key=lambda head: slots[head.tenant] + head.num_slots, default=None)

    def pop(self, sequence: Sequence) -> None:
        """Remove the first sequence of a tenant, whose turn then comes after that of tenants with as many slots."""
        queue = self._queues.pop(sequence.tenant)
        queue.popleft()
        if queue:
            self._queues[sequence.tenant] = queue
