"""The line profiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from logitship.server.check.line_profiler import LineProfiler


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A manual clock: the only element is its time."""
    now = [0.0]
    monkeypatch.setattr("logitship.server.check.line_profiler.time.perf_counter", lambda: now[0])
    return now


def seconds_of(clock: LineProfiler, first: int) -> dict[int, float]:
    """Return the time by line number relative to `first`, without lines of zero time."""
    return {line - first: spent for (_, line), spent in clock.seconds.items() if spent}


def test_time_by_line(ticks: list[float]) -> None:
    def work() -> None:
        ticks[0] += 1
        for _ in range(3):
            ticks[0] += 2

    with LineProfiler() as clock:
        work()
    assert seconds_of(clock, work.__code__.co_firstlineno) == {1: 1, 3: 6}


def test_nested_call_is_counted_once(ticks: list[float]) -> None:
    def inner() -> None:
        ticks[0] += 5

    def outer() -> None:
        ticks[0] += 1
        inner()
        ticks[0] += 1

    with LineProfiler() as clock:
        outer()
    first = inner.__code__.co_firstlineno
    assert seconds_of(clock, first) == {1: 5, 4: 1, 6: 1}


def test_library_time_counts_for_calling_line(ticks: list[float]) -> None:
    def slow(value: int) -> int:
        ticks[0] += 1
        return value

    def work() -> None:
        sorted([3, 2, 1], key=slow)

    with LineProfiler() as clock:
        work()
    assert sum(clock.seconds.values()) == 3


def test_generators_and_exceptions(ticks: list[float]) -> None:
    def numbers() -> Iterator[int]:
        ticks[0] += 1
        yield 1
        ticks[0] += 1
        raise ValueError

    def work() -> None:
        try:
            list(numbers())
        except ValueError:
            ticks[0] += 3

    with LineProfiler() as clock:
        work()
    first = numbers.__code__.co_firstlineno
    assert seconds_of(clock, first) == {1: 1, 3: 1, 10: 3}


def test_previous_tracer_is_restored() -> None:
    before = sys.gettrace()
    with LineProfiler():
        assert sys.gettrace() is not before
    assert sys.gettrace() is before
