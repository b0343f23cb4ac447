"""The priority at which calls begin. Whole engines are in `tests/server/engine/test_deferred_calls.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from logitship.sampler.processors.deferred_calls import BEFORE_ALL, DeferredCall, DeferredCalls
from logitship.sampler.processors.executor import RunOutcome
from logitship.sampler.processors.processor_groups import ProcessorGroup


class Patience:
    """Fake of `StepPatience` that waits for no call.

    Attributes:
        charged: charged seconds, each with its tenant.
    """

    is_limited = True

    def __init__(self) -> None:
        self.charged: list[tuple[str, float]] = []

    def left(self, tenant: str, num_rows: int = 1) -> float:
        return 0.0

    def charge(self, tenant: str, seconds: float) -> None:
        self.charged.append((tenant, seconds))


@dataclass(eq=False)
class Group:
    """The rows of a processor, as far as `DeferredCalls` uses them."""

    tenant: str
    name: str

    def __post_init__(self) -> None:
        self.processor = SimpleNamespace(tenant=self.tenant, group_name=self.name)
        self.rows = [0]

    def count(self, outcome: RunOutcome) -> None:
        pass


@dataclass
class EndedRun:
    """A call that used some CPU seconds."""

    seconds: float

    def wait(self, timeout: float) -> bool:
        return True

    def finish(self) -> RunOutcome:
        return RunOutcome(seconds=1.0, occupied=self.seconds)


class BegunRun:
    """A call that notes whether its priority was lowered."""

    is_low = False

    def lower_priority(self) -> None:
        self.is_low = True


def begins_low(calls: DeferredCalls, of: ProcessorGroup) -> bool:
    run = BegunRun()
    calls.begun(of, cast(Any, run))
    return run.is_low


def group(name: str, tenant: str = "a") -> ProcessorGroup:
    return cast(ProcessorGroup, Group(tenant, name))


@pytest.fixture
def calls() -> DeferredCalls:
    return DeferredCalls(Patience())


def defer(calls: DeferredCalls, of: ProcessorGroup, cpu_seconds: float) -> None:
    run = cast(Any, EndedRun(cpu_seconds))
    calls.add(DeferredCall(run, of, BEFORE_ALL, torch.zeros(1, 4), [], [], lambda *_: {}))


def test_one_new_processor_of_a_tenant_is_tried_in_a_step(calls: DeferredCalls) -> None:
    assert [begins_low(calls, group(name)) for name in "xyz"] == [False, True, True]
    assert not begins_low(calls, group("x", "b"))
    calls.begin_step()
    assert not begins_low(calls, group("y"))


def test_short_ones_are_not_affected_by_others(calls: DeferredCalls) -> None:
    calls.ended_in_time(group("short"))
    defer(calls, group("x"), 1.0)
    assert begins_low(calls, group("new"))
    assert not begins_low(calls, group("short"))
    assert not begins_low(calls, group("new", "b"))


@pytest.mark.parametrize(("cpu_seconds", "is_long"), [(0.001, False), (0.8, True)])
def test_cpu_time_of_a_deferred_call_decides(calls: DeferredCalls, cpu_seconds: float, is_long: bool) -> None:
    """A short one may be late because the machine is busy."""
    defer(calls, group("x"), cpu_seconds)
    calls.collect()
    assert begins_low(calls, group("x")) is is_long
    assert begins_low(calls, group("new")) is is_long
    calls.ended_in_time(group("x"))
    calls.begin_step()
    assert not begins_low(calls, group("x"))
    assert not begins_low(calls, group("new"))


def test_tenant_is_charged_what_this_process_measured() -> None:
    """A sandbox may say anything of its own time, and that of an honest one includes its wait for a core."""
    patience = Patience()
    calls = DeferredCalls(patience)
    defer(calls, group("x"), 0.25)
    calls.collect()
    assert patience.charged == [("a", 0.25)]


def test_nothing_to_protect(calls: DeferredCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    defer(calls, group("x"), 1.0)
    calls.collect()
    monkeypatch.setattr(Patience, "is_limited", False)
    assert not begins_low(calls, group("x"))
    assert calls.left(group("y")) < math.inf
