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
    """Records the thread that started it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.is_running = True
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Starts:
    """Starts fake sandboxes, and can wait for a number of them."""

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


def started_here(sandbox: FakeSandbox) -> bool:
    """Return whether the current thread started it."""
    return sandbox.thread is threading.current_thread()


def test_pool_is_filled_and_refilled() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 2)
    starts.wait_until_made(2)
    assert not started_here(taken(spares))
    starts.wait_until_made(3)
    spares.close()


def test_taken_sandbox_gets_the_cpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is filled at once, and refilled after a pause."""
    waited: list[float] = []

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                waited.append(timeout)
            return super().wait(None if timeout is None else 0)

    monkeypatch.setattr(threading, "Event", Closed)
    monkeypatch.setattr(spare_sandboxes, "PAUSE", 5.0)
    starts = Starts()
    spares = SpareSandboxes(starts, 2)
    starts.wait_until_made(2)
    assert waited == [0.0]
    taken(spares)
    starts.wait_until_made(3)
    assert waited == [0.0, 5.0]
    spares.close()


def test_dead_sandbox_is_skipped() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 1)
    starts.wait_until_made(1)
    (dead,) = starts.made
    dead.is_running = False
    assert taken(spares) is not dead
    assert dead.closed
    spares.close()


def test_empty_pool_starts_a_sandbox() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 0)
    assert started_here(taken(spares))
    assert len(starts.made) == 1
    spares.close()


def test_error_is_raised_by_take() -> None:
    starts = Starts()
    starts.errors = [ZygoteError("no process"), OSError("no memory")]  # raised from the last to the first
    spares = SpareSandboxes(starts, 1)
    starts.wait_for(lambda: len(starts.errors) == 1)
    with pytest.raises(ZygoteError, match="no process"):
        spares.take()
    assert started_here(taken(spares))
    spares.close()


def test_close_closes_unused_sandboxes() -> None:
    starts = Starts()
    spares = SpareSandboxes(starts, 2)
    starts.wait_until_made(2)
    used = taken(spares)
    spares.close()
    assert not used.closed
    assert all(sandbox.closed for sandbox in starts.made if sandbox is not used)
    assert not spares._thread.is_alive()
