"""The time of each line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from logitship.server.check.line_times import LineClock


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still, unless a test moves it: what it shows is the only element."""
    now = [0.0]
    monkeypatch.setattr("logitship.server.check.line_times.time.perf_counter", lambda: now[0])
    return now


def seconds_of(clock: LineClock, first: int) -> dict[int, float]:
    """By line, counted from `first`; only those that took any."""
    return {line - first: spent for (_, line), spent in clock.seconds.items() if spent}


def test_each_line_has_its_own_time(ticks: list[float]) -> None:
    def work() -> None:
        ticks[0] += 1
        for _ in range(3):
            ticks[0] += 2

    with LineClock() as clock:
        work()
    assert seconds_of(clock, work.__code__.co_firstlineno) == {1: 1, 3: 6}


def test_a_call_is_not_counted_twice(ticks: list[float]) -> None:
    def inner() -> None:
        ticks[0] += 5

    def outer() -> None:
        ticks[0] += 1
        inner()
        ticks[0] += 1

    with LineClock() as clock:
        outer()
    first = inner.__code__.co_firstlineno
    assert seconds_of(clock, first) == {1: 5, 4: 1, 6: 1}


def test_time_in_libraries_belongs_to_the_line_that_calls_them(ticks: list[float]) -> None:
    def slow(value: int) -> int:
        ticks[0] += 1
        return value

    def work() -> None:
        sorted([3, 2, 1], key=slow)

    with LineClock() as clock:
        work()
    assert sum(clock.seconds.values()) == 3


def test_generators_and_exceptions_leave_no_line_behind(ticks: list[float]) -> None:
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

    with LineClock() as clock:
        work()
    first = numbers.__code__.co_firstlineno
    assert seconds_of(clock, first) == {1: 1, 3: 1, 10: 3}


def test_the_tracer_that_was_there_comes_back() -> None:
    before = sys.gettrace()
    with LineClock():
        assert sys.gettrace() is not before
    assert sys.gettrace() is before
