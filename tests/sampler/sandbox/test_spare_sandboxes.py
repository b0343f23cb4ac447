from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from logitship.sampler.sandbox import spare_sandboxes
from logitship.sampler.sandbox.spare_sandboxes import SpareSandboxes
from logitship.sampler.sandbox.zygote_process import ZygoteError

LONG = 60.0


class FakeSandbox:
    """Knows where it was started, and whether it lives."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.alive = True
        self.closed = False

    def check(self) -> bool:
        return self.alive

    def close(self) -> None:
        self.closed = True


class Starts:
    """Starts fake sandboxes, and tells when there are so many."""

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []
        self.errors: list[Exception] = []
        self._changed = threading.Condition()

    def __call__(self) -> Any:
        with self._changed:
            self._changed.notify_all()
            if self.errors:
                raise self.errors.pop()
            self.made.append(FakeSandbox())
            return self.made[-1]

    def wait_for(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, LONG)

    def wait_until_made(self, count: int) -> None:
        self.wait_for(lambda: len(self.made) == count)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_sandboxes, "PAUSE", 0.0)


def taken(spares: SpareSandboxes) -> FakeSandbox:
    sandbox: Any = spares.take()
    assert isinstance(sandbox, FakeSandbox)
    return sandbox


def is_own(sandbox: FakeSandbox) -> bool:
    """Whether who took it had to start it."""
    return sandbox.thread is threading.current_thread()


def test_they_are_started_before_they_are_needed_and_again() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 2)
    starts.wait_until_made(2)
    assert not is_own(taken(spares))
    starts.wait_until_made(3)
    spares.close()


def test_a_dead_one_is_not_given_out() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 1)
    starts.wait_until_made(1)
    (dead,) = starts.made
    dead.alive = False
    assert taken(spares) is not dead
    assert dead.closed
    spares.close()


def test_without_a_spare_one_is_started_at_once() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 0)
    assert is_own(taken(spares))
    assert len(starts.made) == 1
    spares.close()


def test_what_is_in_the_way_is_told_to_who_needs_one() -> None:
    starts = Starts()
    starts.errors = [ZygoteError("no process"), OSError("no room")]  # the last is first
    spares = SpareSandboxes(starts, 1)
    starts.wait_for(lambda: len(starts.errors) == 1)
    with pytest.raises(ZygoteError, match="no process"):
        spares.take()
    assert is_own(taken(spares))
    spares.close()


def test_the_end_closes_those_that_nobody_took() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 2)
    starts.wait_until_made(2)
    used = taken(spares)
    spares.close()
    assert not used.closed
    assert all(sandbox.closed for sandbox in starts.made if sandbox is not used)
    assert "logitship-spares" not in {thread.name for thread in threading.enumerate()}
