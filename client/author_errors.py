"""What an author is told of an exception that their code raised.

The text is for the author, who may be anybody: it holds what they wrote and where, and nothing of the process that
their code ran in. So no file is opened here: a code object says of itself which file it is from, and may well say
`/etc/passwd`. Source lines are those that came with a processor string, or none.

The exception itself is the author's code too. It may raise when it is looked at, have causes in a circle or a million
frames. Its attributes are read past its class, and of everything there is a bound.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from .scrub import scrub

LONGEST_TEXT = 4096
"""Characters of an exception's message, or of its traceback, that are kept."""

_LONGEST_NAME = 200
_LONGEST_NOTE = 500
_MOST_EXCEPTIONS = 8
_MOST_NOTES = 4
_DEEPEST_GROUP = 3
_SHOWN_FRAMES = 20
_MOST_FRAMES = 10_000
"""That are looked at, of all exceptions together."""

_PACKAGE = Path(__file__).parent.parent
_OUR_FOLDERS = tuple(
    f"{path}{os.sep}"
    for name in ("client", "sampler", "server")
    for path in dict.fromkeys((_PACKAGE / name, (_PACKAGE / name).resolve()))
)
_MACHINERY = (*_OUR_FOLDERS, pickle.__file__, "<frozen importlib.")
"""How the files begin whose code loads and calls the author's. dill's stands where it was installed."""

_SHIPPED_SOURCE = re.compile(r"<logitship_processor_\d+>")
"""Names of the modules that `loading.py` runs source in. Their lines are in linecache."""

# As `BaseException` keeps them, whatever a subclass says.
_traceback_of = BaseException.__dict__["__traceback__"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_is_context_hidden = BaseException.__dict__["__suppress_context__"].__get__
_variables_of = BaseException.__dict__["__dict__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_name_of = type.__dict__["__name__"].__get__


def class_name(cls: type) -> str:
    """The name that the class was made with, at most 200 characters of it.

    `cls.__name__` asks its metaclass, which may be the author's code.
    """
    return _short(_name_of(cls))


def error_text(error: BaseException) -> str:
    """The exception's type and message, see `error_message`."""
    name, message = class_name(type(error)), error_message(error)
    return f"{name}: {message}" if message else name


def error_message(error: BaseException) -> str:
    """The beginning of the exception's message, scrubbed."""
    text, problem = _message(error)
    if problem:
        return problem
    length = str.__len__(text)
    # Scrubbed before it is cut: half a path would not be known. Scrubbing may make it longer, or far shorter.
    shown = scrub(str.__getitem__(text, slice(4 * LONGEST_TEXT)))
    if length <= 4 * LONGEST_TEXT and len(shown) <= LONGEST_TEXT:
        return shown
    return f"{shown[:LONGEST_TEXT]}… ({length} characters)"


def author_traceback(error: BaseException) -> str:
    """The traceback of an exception, as Python would print it, from where it enters the author's code.

    Frames of the author's code have the file name that came with it, those of libraries a path below the folder that
    they are installed in, and frames of logitship are left out. Causes, contexts and members of groups are included.

    Returns:
        At most `LONGEST_TEXT` characters and `…`, of which the end is kept; "" if there is nothing to tell beyond
        the exception's message.
    """
    try:
        lines = _Report().lines(error)
    # Reading an exception may run the author's code, whatever is done against it.
    except BaseException as second:  # noqa: BLE001
        return f"(the traceback cannot be shown: {class_name(type(second))})"
    return _end("".join(f"{line}\n" for line in lines)) if len(lines) > 1 else ""


class _Report:
    """The lines of one traceback. Holds what is left of the bounds."""

    def __init__(self) -> None:
        self._exceptions_left = _MOST_EXCEPTIONS
        self._frames_left = _MOST_FRAMES
        self._seen: set[int] = set()

    def lines(self, error: BaseException, depth: int = 0) -> list[str]:
        """An exception and what led to it, the oldest first."""
        parts: list[list[str]] = []
        following: BaseException | None = error
        while following is not None and id(following) not in self._seen:
            if self._exceptions_left == 0:
                parts.append(["(further exceptions are left out)"])
                break
            self._exceptions_left -= 1
            self._seen.add(id(following))
            parts.append(self._one(following, depth))
            following, sentence = _reason(following)
            if following is not None and id(following) not in self._seen:
                parts.append(["", sentence, ""])
        return [line for part in reversed(parts) for line in part]

    def _one(self, error: BaseException, depth: int) -> list[str]:
        frames = self._frames(_traceback_of(error))
        lines = ["Traceback (most recent call last):", *frames] if frames else []
        text, problem = _message(error)
        message = problem or _end(text)
        name = class_name(type(error))
        lines.append(f"{name}: {message}" if message else name)
        lines += _notes(error)
        # Not isinstance(), which believes what an object says of its class.
        if issubclass(type(error), BaseExceptionGroup):
            lines += self._members(_members_of(error), depth + 1)
        return lines

    def _members(self, errors: tuple[BaseException, ...], depth: int) -> list[str]:
        lines: list[str] = []
        for number, error in enumerate(errors, 1):
            if depth > _DEEPEST_GROUP or self._exceptions_left == 0:
                return [*lines, "  + (further exceptions are left out)"]
            lines.append(f"  + exception {number} of {len(errors)}")
            lines += [f"  | {line}" for line in self.lines(error, depth)]
        return lines

    def _frames(self, entry: TracebackType | None) -> list[str]:
        shown: deque[_Frames] = deque(maxlen=_SHOWN_FRAMES)
        count = 0
        while entry is not None and self._frames_left:
            self._frames_left -= 1
            code = entry.tb_frame.f_code
            if not _is_machinery(code):
                if shown and shown[-1].is_repeated_by(code, entry):
                    shown[-1].repeats += 1
                else:
                    shown.append(_Frames(code, entry))
                    count += 1
            entry = entry.tb_next
        lines = [line for frames in shown for line in frames.lines()]
        if count > len(shown):
            lines.insert(0, f"  ({count - len(shown)} outer frames are left out)")
        if entry is not None:
            lines.append("  (further frames are left out)")
        return lines


@dataclass
class _Frames:
    """A frame, and how often the same follows it: recursion."""

    code: CodeType
    entry: TracebackType
    repeats: int = 0

    def is_repeated_by(self, code: CodeType, entry: TracebackType) -> bool:
        # By instruction: to find the line of one takes as long as its function has lines.
        return code is self.code and entry.tb_lasti == self.entry.tb_lasti

    def lines(self) -> list[str]:
        filename, number = _short(self.code.co_filename, LONGEST_TEXT), self.entry.tb_lineno
        # Cut at its front: the end says which file it is.
        lines = [f'  File "{filename[-_LONGEST_NAME:]}", line {number}, in {_short(self.code.co_name)}']
        source = _shipped_line(filename, number)
        if source:
            lines.append(f"    {source}")
        if self.repeats:
            lines.append(f"  [Previous line repeated {self.repeats} more time{'s' * (self.repeats > 1)}]")
        return lines


def _is_machinery(code: CodeType) -> bool:
    """True for the code that loads and calls the author's: ours, pickle's, dill's and that of imports."""
    # Unbound: a file name may be a subclass of str.
    filename = code.co_filename
    return str.startswith(filename, _MACHINERY) or str.endswith(filename, f"dill{os.sep}_dill.py")


def _shipped_line(filename: str, number: int | None) -> str:
    """A line of source that came with a processor string, or ""."""
    if number is None or not _SHIPPED_SOURCE.fullmatch(filename):
        return ""
    entry: Any = linecache.cache.get(filename, ())
    lines: list[str] = entry[2] if len(entry) == 4 else []
    return scrub(lines[number - 1].strip())[:_LONGEST_NAME] if 0 < number <= len(lines) else ""


def _reason(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception before this one, and Python's sentence between the two."""
    cause, context = _cause_of(error), _context_of(error)
    if cause is not None:
        return cause, "The above exception was the direct cause of the following exception:"
    if _is_context_hidden(error):
        return None, ""
    return context, "During handling of the above exception, another exception occurred:"


def _message(error: BaseException) -> tuple[str, str]:
    """The exception's message as it is, and "", or why there is none. It is the author's code, which may fail."""
    try:
        return str(error), ""
    except BaseException as second:  # noqa: BLE001
        return "", f"(its message cannot be shown: str() raised {class_name(type(second))})"


def _notes(error: BaseException) -> list[str]:
    """What was added with `add_note`."""
    notes = dict.get(_variables_of(error), "__notes__")  # unbound: it may be a subclass of dict
    if type(notes) is not list:
        return []
    return [_short(note, _LONGEST_NOTE) for note in notes[:_MOST_NOTES] if issubclass(type(note), str)]


def _short(text: str, longest: int = _LONGEST_NAME) -> str:
    return scrub(str.__getitem__(text, slice(longest)))[:longest]


def _end(text: str) -> str:
    """The end of a text, scrubbed."""
    shown = scrub(str.__getitem__(text, slice(-4 * LONGEST_TEXT, None)))
    if str.__len__(text) <= 4 * LONGEST_TEXT and len(shown) <= LONGEST_TEXT:
        return shown
    return f"…{shown[-LONGEST_TEXT:]}"
