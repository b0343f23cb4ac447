"""Progress of a check, with a clock of its own."""

from __future__ import annotations

import io

from logitship.server.check.check_progress import CheckProgress
from tests.helpers.clock import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_fast_check_prints_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = CheckProgress(stream, clock)
    for stage in ("contract", "rows"):
        progress.begin(stage)
        clock.now += 4
        progress.count_call()
    progress.end()
    assert stream.getvalue() == ""


def test_slow_check_in_a_file() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = CheckProgress(stream, clock)
    progress.begin("contract")
    for _ in range(4):
        clock.now += 6
        progress.count_call()
    assert stream.getvalue().splitlines() == [
        "logitship check: contract, call 2 (12 s so far)",
        "logitship check: contract, call 4 (24 s so far)",
    ]


def test_line_on_a_terminal_is_overwritten_and_cleared() -> None:
    stream, clock = Terminal(), Clock()
    progress = CheckProgress(stream, clock)
    clock.now += 1
    progress.begin("rows")
    clock.now += 0.1
    progress.count_call()
    clock.now += 1
    progress.count_call()
    progress.end()
    assert stream.getvalue() == (
        "\rlogitship check: rows (1 s so far)\x1b[K\rlogitship check: rows, call 2 (2 s so far)\x1b[K\r\x1b[K"
    )
