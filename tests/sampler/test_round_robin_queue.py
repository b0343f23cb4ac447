from __future__ import annotations

import pytest

from logitship.sampler.round_robin_queue import RoundRobinQueue, TenantQueueFull


def queue_of(text: str, max_per_tenant: int = 100) -> RoundRobinQueue[str]:
    """One item per word, whose first letter is its tenant."""
    queue: RoundRobinQueue[str] = RoundRobinQueue(max_per_tenant)
    for word in text.split():
        queue.put(word[0], word)
    return queue


def drain(queue: RoundRobinQueue[str]) -> list[str]:
    items = []
    while (taken := queue.get()) is not None:
        items.append(taken[1])
    return items


def test_tenants_take_turns() -> None:
    assert drain(queue_of("a1 a2 a3 b1 c1 c2")) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_new_tenant_waits_for_one_item_of_each_other() -> None:
    queue = queue_of("a1 a2 a3 b1 b2")
    assert queue.get() == ("a", "a1")
    queue.put("c", "c1")
    assert drain(queue) == ["b1", "a2", "c1", "b2", "a3"]


def test_tenant_that_empties_its_queue_gets_no_second_turn() -> None:
    queue = queue_of("a1 b1 c1")
    assert queue.get() == ("a", "a1")
    queue.put("a", "a2")
    assert drain(queue) == ["b1", "c1", "a2"]


def test_tenants_that_may_not_take_keep_their_turn() -> None:
    queue = queue_of("a1 b1")
    assert queue.get(lambda tenant: tenant != "a") == ("b", "b1")
    assert queue.get(lambda tenant: tenant != "a") is None
    queue.put("b", "b2")
    assert drain(queue) == ["a1", "b2"]


def test_bound_per_tenant() -> None:
    queue = queue_of("a1 a2", max_per_tenant=2)
    with pytest.raises(TenantQueueFull):
        queue.put("a", "a3")
    queue.put("b", "b1")
    queue.get()
    queue.put("a", "a3")
    assert len(queue) == 3


def test_removed_items_are_not_taken() -> None:
    queue = queue_of("a1 a2 b1")
    assert queue.remove("a", "a1")
    assert queue.remove("b", "b1")
    assert not queue.remove("b", "b1")
    assert not queue.remove("nobody", "a2")
    assert len(queue) == 1
    assert drain(queue) == ["a2"]
