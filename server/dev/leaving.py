"""The end of `logitship dev`, also while a processor loops or waits in the debugger.

Nothing can end a thread. So if the engine is still in the author's code, the process is ended under it.
"""

from __future__ import annotations

import contextlib
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

TIMEOUT = 2.0
"""Seconds that the engine has to stop."""


def ends_in_time(end: Callable[[], None], timeout: float = TIMEOUT) -> bool:
    """Run `end` in a thread, and return whether it has returned in time."""
    thread = threading.Thread(target=end, name="logitship-dev-end", daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


def authors_position(paths: list[Path]) -> str | None:
    """Return file and line at which a thread is in the author's code, `name.py:12`; None if none is."""
    names = {path.name for path in paths}
    for thread, frame in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename in names:
                return f"{at.f_code.co_filename}:{at.f_lineno}"
            at = at.f_back
    return None


class TerminalSettings:
    """The terminal's settings when this object was made: a debugger that is cut off leaves its own behind."""

    def __init__(self) -> None:
        self._settings: list[Any] | None = None
        # Standard input is no terminal. TypeError: it was closed when Python started, and is None.
        with contextlib.suppress(OSError, TypeError, ValueError, termios.error):
            self._settings = termios.tcgetattr(sys.stdin)

    def restore(self) -> None:
        """Put the settings back."""
        if self._settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)
