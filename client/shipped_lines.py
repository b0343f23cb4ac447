"""Source lines of shipped code objects, for tracebacks.

A code object sets its own file name, which may be `/etc/passwd`, and two clients may have files of the same name. So
the lines are looked up by the object, and no file is opened.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Protocol


class Lines(Protocol):
    """Lines of files."""

    def line(self, filename: str, number: int) -> str:
        """Return a line of a file, or ""."""
        ...


_lines_of: dict[int, tuple[weakref.ref[CodeType], Lines]] = {}
"""By identity: code objects of two clients may be equal."""


def set_lines(codes: Iterable[CodeType], lines: Lines) -> None:
    """Set the lines of code objects, for as long as they exist."""
    for code in codes:
        key = id(code)
        _lines_of[key] = weakref.ref(code, lambda _, key=key: _lines_of.pop(key, None)), lines  # type: ignore[misc]


def line_of(code: CodeType, number: int) -> str:
    """Return a line of a code object's file; "" if it is not known."""
    found = _lines_of.get(id(code))
    # Unbound: a file name may be a subclass of str.
    return found[1].line(str.__getitem__(code.co_filename, slice(None)), number) if found else ""
