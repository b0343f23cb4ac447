from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from logitship.server.engine.scheduler import FairQueue


@dataclass(eq=False)
class Waiting:
    tenant: str
    rid: str = ""
    num_slots: int = 1


def served(queue: FairQueue, slots: Counter[str]) -> list[str]:
    """Serve everything. Slots are never given back."""
    order = []
    while (sequence := queue.first(slots)) is not None:
        queue.pop(sequence)
        slots[sequence.tenant] += sequence.num_slots
        order.append(sequence.rid)
    return order


def filled(*sequences: Any) -> FairQueue:
    queue = FairQueue()
    queue.extend(sequences)
    return queue


def test_one_tenant_is_served_in_order() -> None:
    queue = filled(*(Waiting("a", str(number)) for number in range(5)))
    assert served(queue, Counter()) == ["0", "1", "2", "3", "4"]
    assert len(queue) == 0
    assert queue.first(Counter()) is None


def test_tenants_take_turns_however_many_sequences_one_has() -> None:
    queue = filled(*(Waiting("a", f"a{number}") for number in range(4)), Waiting("b", "b0"), Waiting("b", "b1"))
    assert served(queue, Counter()) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_fewest_slots_come_first() -> None:
    queue = filled(Waiting("a", "a0"), Waiting("b", "b0"), Waiting("b", "b1"))
    assert served(queue, Counter({"a": 2})) == ["b0", "b1", "a0"]


def test_slots_that_a_sequence_needs_count() -> None:
    queue = filled(Waiting("a", "beams", num_slots=8), Waiting("b", "b0"))
    assert served(queue, Counter({"b": 3})) == ["b0", "beams"]


def test_remove() -> None:
    first, second = Waiting("a", "a0"), Waiting("a", "a1")
    queue = filled(first, second)
    queue.remove(first)  # type: ignore[arg-type]
    assert [sequence.rid for sequence in queue] == ["a1"]
    queue.remove(second)  # type: ignore[arg-type]
    assert len(queue) == 0
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove(second)  # type: ignore[arg-type]
