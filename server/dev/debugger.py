"""`breakpoint()` in a processor: pdb that finds the author's files.

Code in a processor string has the name of its file without the folder.
"""

from __future__ import annotations

import os
import pdb
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEFT = BdbQuit.__name__
"""Name of the exception in the author's code after `q` in the debugger."""


@contextmanager
def debugger_for(paths: Callable[[], list[Path]]) -> Iterator[None]:
    """Have `breakpoint()` start pdb with the author's files, unless `PYTHONBREAKPOINT` names another debugger.

    Args:
        paths: returns the author's files.
    """
    if os.environ.get("PYTHONBREAKPOINT"):
        yield  # a function of ours in between would be the frame in which that debugger stops
        return

    def start(*arguments: Any, **keywords: Any) -> None:
        _Debugger({path.name: str(path) for path in paths()}).set_trace(sys._getframe(1))

    before = sys.breakpointhook
    sys.breakpointhook = start
    try:
        yield
    finally:
        sys.breakpointhook = before


class _Debugger(pdb.Pdb):
    """A pdb that knows the folders of files.

    Args:
        paths: the paths, by file name.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        super().__init__()
        self._paths = paths

    def canonic(self, filename: str) -> str:
        """Return the full path of a code object's file."""
        return self._paths.get(filename) or super().canonic(filename)
