"""Terminal settings are restored, also where standard input is not a terminal."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from typing import TextIO

import pytest

from logitship.server.dev.leaving import TerminalSettings


def closed_input() -> TextIO:
    text = io.StringIO()
    text.close()
    return text


@pytest.mark.parametrize("stdin", [None, io.StringIO(), closed_input()], ids=["none", "no file", "closed"])
def test_input_without_terminal(stdin: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    TerminalSettings().restore()


def test_settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        settings = TerminalSettings()
        before = termios.tcgetattr(terminal)
        changed = termios.tcgetattr(terminal)
        changed[3] ^= termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
        settings.restore()
        assert termios.tcgetattr(terminal) == before
