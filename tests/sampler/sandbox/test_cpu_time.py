"""Deadlines, on a clock that the tests set, and the clocks, priorities and cores of real processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from logitship.sampler.sandbox import cpu_time
from logitship.sampler.sandbox.cpu_time import CREDIT_PERIOD, CallDeadline, FirstCallCredit, ProcessClock

LONG = 60.0


class FakeTime:
    """The time of the wall clock, and the CPU time and state of a process."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu: float | None = 7.0
        self.without_core = 3.0
        self.runnable = True

    def perf_counter(self) -> float:
        return self.now

    def cpu_seconds(self) -> float | None:
        return self.cpu

    def is_runnable(self) -> bool:
        return self.runnable

    def seconds_without_core(self) -> float:
        return self.without_core

    def run(self, seconds: float, share: float) -> None:
        """Let the process run with a share of a core."""
        self.now += seconds
        assert self.cpu is not None
        self.cpu += share * seconds


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(cpu_time, "time", fake)
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
    fake.run(0.1, 0.0)
    assert deadline.exceeded() is None
    assert deadline.next_look > fake.now + 0.9


def test_look_before_it_is_due_changes_nothing(fake: FakeTime) -> None:
    """Otherwise a process that pages in memory for a moment could be taken for one that waits."""
    fake.runnable = False
    deadline = CallDeadline(fake, 2.0)  # type: ignore[arg-type]
    fake.run(2.0, 0.0)
    assert deadline.exceeded() is None
    next_look = deadline.next_look
    fake.run(0.01, 0.0)
    assert deadline.exceeded() is None
    assert deadline.next_look == next_look
    fake.run(0.1, 0.0)
    assert deadline.exceeded() == "2 s"


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


def test_time_used_is_that_of_the_cpu_or_of_waiting(fake: FakeTime) -> None:
    """It is used up by a process that sleeps, but not by one that gets no core."""
    deadline = CallDeadline(fake, 2.0)  # type: ignore[arg-type]
    fake.run(0.5, 1.0)
    assert deadline.seconds_used() == 0.5
    fake.run(1.0, 0.0)
    assert deadline.seconds_used() == 1.5
    fake.run(4.0, 0.0)
    fake.without_core += 4.0
    assert deadline.seconds_used() == 1.5
    fake.without_core = 0.0  # it has ended
    assert deadline.seconds_used() == 5.5


def test_time_used_before_anybody_waits(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0, is_awaited=False)  # type: ignore[arg-type]
    fake.run(4.0, 0.25)
    fake.without_core += 3.0
    assert deadline.seconds_used() == 1.0
    deadline.start_waiting()
    fake.run(0.5, 0.0)
    assert deadline.seconds_used() == 1.0
    fake.run(1.0, 0.0)
    fake.without_core += 0.25
    assert deadline.seconds_used() == 1.25


def test_time_wanted_is_that_of_the_cpu_and_of_waiting_for_a_core(fake: FakeTime) -> None:
    deadline = CallDeadline(fake, 2.0, is_awaited=False)  # type: ignore[arg-type]
    fake.run(2.0, 0.25)
    fake.without_core += 1.0
    assert deadline.cpu_seconds_wanted() == 0.5
    deadline.start_waiting()
    fake.run(4.0, 0.25)
    fake.without_core += 3.0
    assert deadline.cpu_seconds_wanted() == 4.5


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


def test_clock_counts_the_time_without_a_core(spinning: subprocess.Popen[bytes]) -> None:
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    for process in (spinning, other):
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    clock = ProcessClock(spinning.pid)
    first, end = clock.seconds_without_core(), time.monotonic() + LONG
    while clock.seconds_without_core() < first + 0.05:
        assert time.monotonic() < end
    for process in (spinning, other):
        process.kill()
        process.wait()
    assert clock.seconds_without_core() == 0.0


def test_sleeping_process_is_not_runnable() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    clock = ProcessClock(process.pid)
    end = time.monotonic() + LONG
    while clock.is_runnable():
        assert time.monotonic() < end
    process.kill()
    process.wait()


def test_extra_time_is_used_once_in_a_period() -> None:
    now = 1000.0
    credit = FirstCallCredit(1.0, 10.0, clock=lambda: now)
    assert credit.remaining("a") == 9.0
    credit.use("a", 0.5)  # no longer than any other call
    credit.use("a", 1.0)
    assert credit.remaining("a") == 9.0
    credit.use("a", 3.0)
    assert credit.remaining("a") == 7.0
    credit.use("a", 10.0)
    assert credit.remaining("a") == 0.0
    assert credit.remaining("b") == 9.0, "another tenant has its own"
    now += CREDIT_PERIOD / 3
    assert credit.remaining("a") == pytest.approx(1.0)
    now += 10 * CREDIT_PERIOD
    assert credit.remaining("a") == 9.0


def test_first_step_timeout_below_the_step_timeout() -> None:
    assert FirstCallCredit(2.0, 1.0).remaining("a") == 0.0


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.kill()
    process.wait()


def nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def may_restore() -> bool:
    """Return whether this user may lower a nice value, as tried by another process."""
    attempt = "import os; os.setpriority(os.PRIO_PROCESS, 0, 19); os.setpriority(os.PRIO_PROCESS, 0, 0)"
    return subprocess.run(["python", "-c", attempt], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_lower_and_restore(pid: int) -> None:
    before = nice(pid)
    cpu_time.lower_priority(pid, cpu_time.LOADING_NICE)
    assert nice(pid) == max(before, cpu_time.LOADING_NICE)
    cpu_time.lower_priority(pid, cpu_time.DEFERRED_NICE)
    assert nice(pid) == cpu_time.DEFERRED_NICE
    cpu_time.restore_priority(pid)
    assert nice(pid) == (before if may_restore() else cpu_time.DEFERRED_NICE)


def test_server_of_lower_priority(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_time, "_own_nice", lambda: 15)
    cpu_time.lower_priority(pid, cpu_time.LOADING_NICE)
    assert nice(pid) == 15


@pytest.mark.parametrize(("num_threads", "expected"), [(1, {3, 5, 8}), (3, {8}), (4, {2, 3, 5, 8}), (9, {2, 3, 5, 8})])
def test_background_cores(num_threads: int, expected: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 2, 3, 5})
    assert cpu_time.background_cores(num_threads) == expected


def test_background_and_back(pid: int) -> None:
    cores = cpu_time.background_cores(1)
    cpu_time.move_to_background(pid, cores)
    assert nice(pid) >= cpu_time.LOADING_NICE
    assert os.sched_getaffinity(pid) == cores
    cpu_time.leave_background(pid)
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
    assert nice(pid) == (nice(0) if may_restore() else cpu_time.LOADING_NICE)


def test_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    cpu_time.lower_priority(process.pid, cpu_time.DEFERRED_NICE)
    cpu_time.restore_priority(process.pid)
    cpu_time.move_to_background(process.pid, cpu_time.background_cores(1))
    cpu_time.leave_background(process.pid)


def test_process_starts_on_another_core(pid: int) -> None:
    cores = os.sched_getaffinity(pid)
    this = min(cores)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {this})
    try:
        with cpu_time.off_this_core(pid):
            assert os.sched_getaffinity(pid) == (cores - {this} or cores)
        assert os.sched_getaffinity(pid) == cores
    finally:
        os.sched_setaffinity(0, mine)


def test_process_that_may_use_one_core_stays_there(pid: int) -> None:
    this = min(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(pid, {this})
    os.sched_setaffinity(0, {this})
    try:
        with cpu_time.off_this_core(pid):
            assert os.sched_getaffinity(pid) == {this}
    finally:
        os.sched_setaffinity(0, mine)
    assert os.sched_getaffinity(pid) == {this}


def test_process_that_has_ended_is_no_error(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with cpu_time.off_this_core(pid):
        pass


def test_processes_that_end_are_told_from_those_that_run() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        clock = ProcessClock(process.pid)
        assert not clock.is_exiting()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert clock.is_exiting()
    assert clock.is_exiting()  # nothing is left of it
