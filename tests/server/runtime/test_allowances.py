from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.server.runtime import allowances
from logitship.server.runtime.allowances import BURST, MEMORY, MIN_NEW, MIN_SLOW, MIN_START, PAUSE, Allowances


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeGroup:
    """A call of one processor for some requests."""

    def __init__(self, *rids: str, name: str = "sha256:a", tenant: str = "") -> None:
        self.processor: Any = SimpleNamespace(tenant=tenant, group_name=f"/{name}", digest=name, name="Slow")
        self.members = [SimpleNamespace(rid=rid, processor=self.processor, name="Slow") for rid in rids]
        self.rows = [*range(len(rids))]


class Steps:
    """An engine that computes for 0.1 s between its steps, each of which has ten requests."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.allowances = Allowances(0.2, self.clock)

    def call(self, group: Any, seconds: float, num_requests: int = 10) -> bool:
        """Make a call that takes some time. Return whether the step waited for its end."""
        self.clock.now += 0.1
        self.allowances.begin_apply(num_requests)
        left = self.allowances.left(group)
        self.clock.now += min(left, seconds)
        if seconds <= left:
            self.allowances.ended_in_time(group)
        else:
            self.allowances.add(SimpleNamespace(group=group))  # type: ignore[arg-type]
            self.allowances._calls.clear()
        self.allowances.end_apply()
        return seconds <= left


def test_steps_wait_for_a_share_of_the_own_time() -> None:
    steps, group = Steps(), FakeGroup("a")
    assert all(steps.call(group, 0.019) for _ in range(1000))
    count = next(number for number in range(100) if not steps.call(group, 0.03))
    assert count == pytest.approx((BURST - 0.03) / (0.03 - 0.02), abs=2)


def test_request_that_is_alone_is_not_limited() -> None:
    steps = Steps()
    assert steps.call(FakeGroup("a"), 50.0, num_requests=1)
    assert steps.call(FakeGroup("a", "b"), 50.0, num_requests=2)
    assert not steps.call(FakeGroup("a"), 50.0, num_requests=2)


def test_requests_of_other_steps_count() -> None:
    """SGLang computes the prompt of a request in a step without the decoding ones."""
    steps = Steps()
    steps.allowances.plain_step()
    assert not steps.call(FakeGroup("a"), 50.0, num_requests=1)
    for _ in range(MEMORY):
        steps.call(FakeGroup("a"), 0.001, num_requests=1)
    assert steps.call(FakeGroup("a"), 50.0, num_requests=1)


def test_next_request_of_a_slow_class_starts_with_less() -> None:
    steps = Steps()
    lefts = []
    for number in range(8):
        group = FakeGroup(str(number))
        before = steps.clock.now
        assert not steps.call(group, 5.0)
        lefts.append(steps.clock.now - before - 0.1)
    assert lefts[0] == pytest.approx(BURST)
    assert lefts[1] == pytest.approx(min(BURST / 4, 0.02))  # the tenant's, which its first request has used up
    assert lefts[-1] == pytest.approx(MIN_START)


def test_requests_get_a_little_when_others_have_used_up_the_tenants() -> None:
    steps = Steps()
    for number in range(4):
        steps.call(FakeGroup(str(number), name=str(number)), 5.0)
    assert steps.call(FakeGroup("honest", name="honest"), MIN_NEW)


def test_steps_wait_no_longer_for_requests_that_can_sit_out() -> None:
    """Once one has sat out, a step waits a moment for its next call, and as before when that ended in time."""
    steps, slow, other = Steps(), FakeGroup("slow", name="slow"), FakeGroup("other", name="slow")
    assert not steps.call(slow, 50.0)
    steps.allowances.sits_out("slow")
    for _ in range(100):
        steps.call(FakeGroup("plain", name="plain"), 0.0)
    assert not steps.call(slow, MIN_SLOW + 0.001)
    assert steps.call(other, 0.05)  # it has not sat out
    assert steps.call(slow, MIN_SLOW)
    assert steps.call(slow, 0.1)


def test_slow_request_is_told_what_it_used() -> None:
    steps, group = Steps(), FakeGroup("a")
    steps.call(group, 5.0)
    fault = steps.allowances.too_slow([group.members[0]], "LOGITSHIP_VLLM_STEP_SHARE")
    assert fault.kind == "too_slow"
    assert f"steps have waited {BURST * 1e3:.0f} ms for this request" in fault.message
    assert "0.2 of the time that the engine computes (LOGITSHIP_VLLM_STEP_SHARE)" in fault.message


def test_long_pauses_of_the_engine_do_not_count() -> None:
    steps, group = Steps(), FakeGroup("a")
    steps.call(group, BURST / 2)
    steps.clock.now += 1e6
    assert steps.allowances.left(group) < math.inf
    assert not steps.call(group, BURST * 1.01)


def test_ended_request_is_forgotten() -> None:
    steps = Steps()
    steps.call(FakeGroup("a"), 0.01)
    steps.allowances.drop("a")
    assert not steps.allowances._requests


def test_tenants_with_a_full_allowance_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may name any number of tenants."""
    monkeypatch.setattr(allowances, "_MAX_KNOWN", 3)
    steps = Steps()
    slow = FakeGroup("slow", tenant="slow")
    for number in range(100):
        steps.call(slow, 0.1)
        steps.call(FakeGroup(str(number), name=str(number), tenant=str(number)), 0.0)
    assert len(steps.allowances._tenants) <= 4
    assert steps.allowances._tenants["slow"].left < BURST / 2


def test_new_requests_wait_for_a_moment_when_one_with_the_same_class_has_ended() -> None:
    steps, slow, other = Steps(), FakeGroup("a"), FakeGroup("b", name="sha256:b")
    name = slow.processor.group_name
    assert steps.call(other, 0.01)
    assert not steps.allowances.is_paused(name)
    assert not steps.call(slow, 5.0)
    assert not steps.allowances.is_paused(name)
    steps.allowances.too_slow(slow.members, "LOGITSHIP_VLLM_STEP_SHARE")
    assert steps.allowances.is_paused(name)
    assert not steps.allowances.is_paused(other.processor.group_name)
    steps.clock.now += PAUSE
    assert not steps.allowances.is_paused(name)
