"""Deadlines, on a clock that the tests set, and the clocks of real processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from logitship.sampler.sandbox import deadline as deadline_module
from logitship.sampler.sandbox.deadline import CallDeadline, ProcessClock

LONG = 60.0


class FakeTime:
    """The time of the wall clock, and the CPU time and state of a process."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu: float | None = 7.0
        self.runnable = True

    def perf_counter(self) -> float:
        return self.now

    def cpu_seconds(self) -> float | None:
        return self.cpu

    def is_runnable(self) -> bool:
        return self.runnable

    def run(self, seconds: float, share: float) -> None:
        """Let the process run with a share of a core."""
        self.now += seconds
        assert self.cpu is not None
        self.cpu += share * seconds


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(deadline_module, "time", fake)
    return fake


def due(fake: FakeTime, seconds: float, share: float, backstop: float | None = None) -> tuple[float, str]:
    """Return after how many seconds a process with a share of a core is killed, and the reason."""
    deadline = CallDeadline(fake, seconds, backstop)  # type: ignore[arg-type]  # has the methods of a ProcessClock
    began = fake.now
    for _ in range(1000):
        fake.run(max(0.0, deadline.next_look - fake.now), share)
        if (reason := deadline.exceeded()) is not None:
            return round(fake.now - began, 1), reason
    raise AssertionError("it is never killed")


def test_process_that_computes_has_its_cpu_time(fake: FakeTime) -> None:
    assert due(fake, 2.0, 1.0) == (2.0, "2 s of CPU time")
    assert due(fake, 2.0, 0.5) == (4.0, "2 s of CPU time")


def test_process_without_a_core_ends_at_the_backstop(fake: FakeTime) -> None:
    assert due(fake, 2.0, 0.1) == (10.0, "10 s, in which it got 1.000 s of CPU time")
    assert due(fake, 2.0, 0.1, backstop=3.0) == (3.0, "3 s, in which it got 0.300 s of CPU time")


def test_deferred_call_has_a_later_backstop(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0)  # type: ignore[arg-type]
    deadline.extend(40.0)
    fake.run(20.0, 0.01)
    assert deadline.exceeded() is None
    fake.run(20.0, 0.01)
    assert deadline.exceeded() == "40 s, in which it got 0.400 s of CPU time"


def test_process_that_waits_ends_at_once(fake: FakeTime) -> None:
    fake.runnable = False
    killed_after, reason = due(fake, 2.0, 0.0)
    assert 2.0 <= killed_after < 2.2
    assert reason == "2 s"


def test_process_that_waits_for_a_moment_goes_on(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0)  # type: ignore[arg-type]
    fake.run(2.0, 0.5)
    fake.runnable = False
    assert deadline.exceeded() is None
    assert fake.now < deadline.next_look < fake.now + 0.5
    fake.run(0.1, 0.5)  # it has computed since
    assert deadline.exceeded() is None
    fake.runnable = True
    assert deadline.exceeded() is None
    assert deadline.next_look > fake.now + 0.9


@pytest.mark.parametrize("runnable", [True, False])
def test_wall_clock_starts_once_somebody_waits(fake: FakeTime, runnable: bool) -> None:
    """Before, the process may wait, or get no core, as long as the model computes."""
    fake.runnable = runnable
    deadline = CallDeadline(fake, 2.0, is_awaited=False)  # type: ignore[arg-type]
    fake.run(1000.0, 0.001)
    assert deadline.exceeded() is None
    assert deadline.next_look == fake.now + 1.0
    fake.run(1.0, 0.0)
    assert deadline.exceeded() is None
    deadline.start_waiting()
    assert deadline.next_look == fake.now + 1.0
    fake.run(1.0, 0.0)
    assert deadline.exceeded() is None
    deadline.start_waiting()  # it has started already
    fake.run(9.0, 0.0)
    assert deadline.exceeded() == "10 s, in which it got 1.000 s of CPU time"


def test_cpu_time_counts_before_anybody_waits(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0, is_awaited=False)  # type: ignore[arg-type]
    fake.run(4.0, 0.5)
    assert deadline.exceeded() == "2 s of CPU time"
    deadline.start_waiting()
    assert deadline.next_look == fake.now
    assert deadline.exceeded() == "2 s of CPU time"


def test_process_that_ended_is_due_by_the_wall_clock(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0)  # type: ignore[arg-type]
    fake.now += 3.0
    fake.cpu = None
    assert deadline.cpu_seconds() == 3.0
    assert deadline.exceeded() == "2 s of CPU time"


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    yield process
    process.kill()
    process.wait()


def test_clock_of_a_process(spinning: subprocess.Popen[bytes]) -> None:
    clock = ProcessClock(spinning.pid)
    first = clock.cpu_seconds()
    assert first is not None
    end = time.monotonic() + LONG
    while not ((now := clock.cpu_seconds()) and now > first + 0.01 and clock.is_runnable()):
        assert time.monotonic() < end
    spinning.kill()
    spinning.wait()
    assert clock.cpu_seconds() is None
    assert not clock.is_runnable()


def test_sleeping_process_is_not_runnable() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    clock = ProcessClock(process.pid)
    end = time.monotonic() + LONG
    while clock.is_runnable():
        assert time.monotonic() < end
    process.kill()
    process.wait()
