"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """A clock that stands still. It also replaces the module `time` of the code under test."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now
