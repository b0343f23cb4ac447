from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context

import pytest

from logitship.sampler.client_context import Disconnect, current_disconnect
from logitship.sampler.fair_slots import FairSlots
from logitship.sampler.round_robin_queue import TenantQueueFull

GENEROUS = 30.0


def test_first_free_slot_is_used() -> None:
    slots = FairSlots(["first", "second", "third"], 10)
    with slots.use("a", 0) as one, slots.use("b", 0) as other:
        assert (one, other) == ("first", "second")
        assert (slots.num_in_use, slots.num_waiting) == (2, 0)
    with slots.use("a", 0) as again:
        assert again == "first"


def test_one_slot_is_left_for_other_tenants() -> None:
    slots = FairSlots([1, 2, 3], 10)
    with slots.use("a", 0), slots.use("a", 0):
        with pytest.raises(TimeoutError), slots.use("a", 0):
            pass
        with slots.use("b", 0) as slot:
            assert slot == 3


def test_single_slot_may_be_used_by_any() -> None:
    slots = FairSlots([1], 10)
    for tenant in "aba":
        with slots.use(tenant, 0) as slot:
            assert slot == 1


def test_those_who_wait_take_turns() -> None:
    slots = FairSlots([1], 10)
    order: list[str] = []
    queued = threading.Semaphore(0)

    def use(tenant: str) -> None:
        with slots.use(tenant, GENEROUS):
            order.append(tenant)

    with ThreadPoolExecutor(6) as threads, ExitStack() as held:
        held.enter_context(slots.use("x", 0))
        waiting: list[Future[None]] = []
        for number, tenant in enumerate("aaabbc", start=1):
            waiting.append(threads.submit(use, tenant))
            while slots.num_waiting < number:
                queued.acquire(timeout=0.001)
        held.close()
        for each in waiting:
            each.result(GENEROUS)
    assert order == ["a", "b", "c", "a", "b", "a"]
    assert (slots.num_in_use, slots.num_waiting) == (0, 0)


def test_bound_on_waiting_threads() -> None:
    slots = FairSlots([1], 0)
    with pytest.raises(TenantQueueFull), slots.use("a", 0):
        pass


def test_disconnect_ends_the_wait() -> None:
    slots = FairSlots([1], 1)
    disconnect = Disconnect()

    def use() -> None:
        current_disconnect.set(disconnect)
        with slots.use("a", GENEROUS):
            pytest.fail("got a slot")

    with ThreadPoolExecutor(1) as threads, slots.use("b", 0):
        waiting = threads.submit(copy_context().run, use)
        while not slots._waiting:
            threading.Event().wait(0.001)
        disconnect.notify()
        with pytest.raises(TimeoutError):
            waiting.result(GENEROUS / 2)
        assert not slots._waiting
        again = threads.submit(copy_context().run, use)
        with pytest.raises(TimeoutError):
            again.result(GENEROUS / 2)


def test_slot_is_freed_by_an_exception() -> None:
    slots = FairSlots([1], 1)
    with pytest.raises(ZeroDivisionError), slots.use("a", 0):
        raise ZeroDivisionError
    with slots.use("a", 0):
        pass
