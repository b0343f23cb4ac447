"""Progress of a check on standard error: which check runs, and how many calls it has made.

A check makes some hundred calls. For a slow class, it takes minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_SECONDS_ON_TERMINAL, _SECONDS_ELSEWHERE = 0.2, 10.0
"""Time between two updates. A line that cannot be overwritten is only written if there is time to read it."""


class CheckProgress:
    """Reports what a check is doing, and nothing about a check that is fast.

    Args:
        stream: None: standard error at the time of writing.
        clock: returns the time in seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._clock = clock
        self._began = self._last = clock()
        self._stage = ""
        self._calls = 0

    def begin(self, stage: str) -> None:
        """Begin another check, or another step before them."""
        self._stage, self._calls = stage, 0
        self._update()

    def count_call(self) -> None:
        """Count a call of the processor."""
        self._calls += 1
        self._update()

    def end(self) -> None:
        """Clear the line."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _update(self) -> None:
        now = self._clock()
        if now - self._last < (_SECONDS_ON_TERMINAL if self._is_terminal else _SECONDS_ELSEWHERE):
            return
        self._last = now
        calls = f", call {self._calls}" if self._calls else ""
        text = f"logitship check: {self._stage}{calls} ({now - self._began:.0f} s so far)"
        print(
            f"\r{text}\x1b[K" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=self._stream
        )
        self._stream.flush()
