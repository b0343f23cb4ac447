"""Priorities, as root and as an ordinary user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from logitship.sampler.sandbox import priority


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
    priority.lower(pid, priority.LOADING)
    assert nice(pid) == max(before, priority.LOADING)
    priority.lower(pid, priority.DEFERRED)
    assert nice(pid) == priority.DEFERRED
    priority.restore(pid)
    assert nice(pid) == (before if may_restore() else priority.DEFERRED)


def test_server_of_lower_priority(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "_own_nice", lambda: 15)
    priority.lower(pid, priority.LOADING)
    assert nice(pid) == 15


def test_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    priority.lower(process.pid, priority.DEFERRED)
    priority.restore(process.pid)


def test_process_starts_on_another_core(pid: int) -> None:
    cores = os.sched_getaffinity(pid)
    this = min(cores)
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {this})
    try:
        with priority.off_this_core(pid):
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
        with priority.off_this_core(pid):
            assert os.sched_getaffinity(pid) == {this}
    finally:
        os.sched_setaffinity(0, mine)
    assert os.sched_getaffinity(pid) == {this}


def test_process_that_has_ended_is_no_error(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with priority.off_this_core(pid):
        pass
