"""Priorities, as root and as an ordinary user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from logitship.sampler.sandbox import priority


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def autogroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/autogroup").read_text().rpartition("nice ")[2].strip()
    except OSError:
        return "none"


def state(pid: int) -> tuple[int, set[int], str]:
    """Return the nice value, the cores and the autogroup's nice value of a process."""
    return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), autogroup(pid)


def test_lower_and_restore(pid: int) -> None:
    before = state(pid)
    priority.lower(pid)
    if priority.can_restore():
        assert state(pid)[0] == 10
        assert autogroup(pid) in ("10", "none")
    assert state(pid) != before
    priority.restore(pid)
    assert state(pid) == before


def test_cores_without_the_privilege(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "can_restore", lambda: False)
    before = state(pid)
    priority.lower(pid)
    assert state(pid) == (before[0], {max(before[1])}, before[2])
    priority.restore(pid)
    assert state(pid) == before


def test_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    priority.lower(process.pid)
    priority.restore(process.pid)
