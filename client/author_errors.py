"""Error messages and tracebacks of exceptions in the author's code.

The text is sent to the author, who is not trusted: it contains the author's own code and positions in it, and nothing
of the process that ran it. So no file is opened here: a code object sets its own file name, which may be `/etc/passwd`.
Source lines come from the processor string only.

The exception itself is the author's code too. It may raise when it is inspected, and have cyclic causes or a million
frames. Its attributes are read without calling its class, and everything is bounded.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from .errors import PRINTED
from .scrub import scrub
from .shipped_lines import line_of

MAX_TEXT_LENGTH = 4096
"""Maximum number of characters of an exception's message, or of its traceback."""

_MAX_NAME_LENGTH = 200
_MAX_NOTE_LENGTH = 500
_MAX_EXCEPTIONS = 8
_MAX_NOTES = 4
_MAX_GROUP_DEPTH = 3
_SHOWN_FRAMES = 20
_MAX_FRAMES = 10_000
"""Maximum number of inspected frames, of all exceptions together."""

_FILE_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, OSError, PermissionError)

_PACKAGE = Path(__file__).parent.parent
_OUR_FOLDERS = tuple(
    f"{path}{os.sep}"
    for name in ("builtin_processors", "client", "sampler", "server")
    for path in dict.fromkeys((_PACKAGE / name, (_PACKAGE / name).resolve()))
)
_MACHINERY = (*_OUR_FOLDERS, pickle.__file__, "<frozen importlib.")
"""Prefixes of the files whose code loads and calls the author's code. dill is matched by its file name."""

_SHIPPED_SOURCE = re.compile(r"<logitship_processor_\d+>")
"""File names of source that `loading.py` runs. Its lines are in linecache."""

_FRAME_WITH_LINE = re.compile(r'^  File "([^"\n]{0,200})", (line \d+, in [^\n]{1,200})\n    (\S[^\n]*)$', re.MULTILINE)

# The slots of `BaseException`, which subclasses cannot override.
_traceback_of = BaseException.__dict__["__traceback__"].__get__
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__
_is_context_hidden = BaseException.__dict__["__suppress_context__"].__get__
_variables_of = BaseException.__dict__["__dict__"].__get__
_members_of = BaseExceptionGroup.__dict__["exceptions"].__get__
_name_of = type.__dict__["__name__"].__get__


def class_name(cls: type) -> str:
    """Return the name that the class was created with, at most 200 characters of it.

    `cls.__name__` would call its metaclass, which may be the author's code.
    """
    return _short(_name_of(cls))


def error_text(error: BaseException) -> str:
    """Return the exception's type and message, see `error_message`."""
    name, message = class_name(type(error)), error_message(error)
    return f"{name}: {message}" if message else name


def error_message(error: BaseException) -> str:
    """Return the beginning of the exception's message, scrubbed."""
    text, problem = _message(error)
    if problem:
        return problem
    if (path := _authors_path(error)) is not None:
        return _with_path(error, path)
    length = str.__len__(text)
    # Scrub before truncating: half a path would not be recognized. Scrubbing may change the length a lot.
    shown = scrub(str.__getitem__(text, slice(4 * MAX_TEXT_LENGTH)))
    if length <= 4 * MAX_TEXT_LENGTH and len(shown) <= MAX_TEXT_LENGTH:
        return shown
    return f"{shown[:MAX_TEXT_LENGTH]}… ({length} characters)"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its causes and contexts, a few at most."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen and len(seen) < _MAX_EXCEPTIONS:
        seen.add(id(following))
        yield following
        following, _ = _reason(following)


def frames_of(error: BaseException, max_frames: int) -> Iterator[FrameType]:
    """Yield the frames of an exception's traceback, the outermost first, `max_frames` at most."""
    entry = _traceback_of(error)
    while entry is not None and max_frames:
        yield entry.tb_frame
        entry, max_frames = entry.tb_next, max_frames - 1


def author_line(traceback: str) -> str:
    """Return where the exception of a traceback was raised in the author's code, with the line's text.

    Args:
        traceback: from `author_traceback`. What follows the exception is ignored.

    Returns:
        Such as `ban.py, line 7, in __call__: x = params["x"]`; "" if no frame has a text.
    """
    entries = list(_FRAME_WITH_LINE.finditer(traceback[-4 * MAX_TEXT_LENGTH :].partition(f"\n{PRINTED}\n")[0]))
    if not entries:
        return ""
    filename, place, line = entries[-1].groups()
    return f"{place}: {line}" if is_shipped_source(filename) else f"{filename}, {place}: {line}"


def author_traceback(error: BaseException, *, with_causes: bool = True) -> str:
    """Format the traceback of an exception as Python would, from where it enters the author's code.

    Frames of the author's code have the file name in their code object, those of libraries a path relative to their
    installation folder; frames of logitship are omitted. Causes, contexts and members of groups are included.

    Args:
        error: the exception.
        with_causes: whether to include its causes and contexts.

    Returns:
        The last `MAX_TEXT_LENGTH` characters, after `…` if it is longer; "" if there is nothing but the exception's
        message.
    """
    try:
        lines = _Report(with_causes=with_causes).lines(error)
    # Reading an exception may run the author's code despite all precautions.
    except BaseException as second:  # noqa: BLE001  # boundary: author code
        return f"(the traceback cannot be shown: {class_name(type(second))})"
    return _end("".join(f"{line}\n" for line in lines)) if len(lines) > 1 else ""


class _Report:
    """Formatter of one traceback, with the remaining budget of exceptions and frames."""

    def __init__(self, *, with_causes: bool) -> None:
        self._with_causes = with_causes
        self._exceptions_left = _MAX_EXCEPTIONS
        self._frames_left = _MAX_FRAMES
        self._seen: set[int] = set()

    def lines(self, error: BaseException, depth: int = 0) -> list[str]:
        """Return the lines of an exception and its causes, the oldest first."""
        parts: list[list[str]] = []
        following: BaseException | None = error
        while following is not None and id(following) not in self._seen:
            if self._exceptions_left == 0:
                parts.append(["(further exceptions are left out)"])
                break
            self._exceptions_left -= 1
            self._seen.add(id(following))
            parts.append(self._one(following, depth))
            following, sentence = _reason(following) if self._with_causes else (None, "")
            if following is not None and id(following) not in self._seen:
                parts.append(["", sentence, ""])
        return [line for part in reversed(parts) for line in part]

    def _one(self, error: BaseException, depth: int) -> list[str]:
        frames = self._frames(_traceback_of(error))
        lines = ["Traceback (most recent call last):", *frames] if frames else []
        text, problem = _message(error)
        path = _authors_path(error)
        message = problem or (_end(text) if path is None else _with_path(error, path))
        name = class_name(type(error))
        lines.append(f"{name}: {message}" if message else name)
        lines += _notes(error)
        # Not isinstance(), which trusts the object's __class__.
        if issubclass(type(error), BaseExceptionGroup):
            lines += self._members(_members_of(error), depth + 1)
        return lines

    def _members(self, errors: tuple[BaseException, ...], depth: int) -> list[str]:
        lines: list[str] = []
        for number, error in enumerate(errors, 1):
            if depth > _MAX_GROUP_DEPTH or self._exceptions_left == 0:
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
            if not is_machinery(code.co_filename):
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
    """A frame and the number of times it repeats, for recursion."""

    code: CodeType
    entry: TracebackType
    repeats: int = 0

    def is_repeated_by(self, code: CodeType, entry: TracebackType) -> bool:
        # By instruction: finding the line number takes time linear in the length of the function.
        return code is self.code and entry.tb_lasti == self.entry.tb_lasti

    def lines(self) -> list[str]:
        filename, number = _short(self.code.co_filename, MAX_TEXT_LENGTH), self.entry.tb_lineno
        # Truncated at the front: the end identifies the file.
        lines = [f'  File "{filename[-_MAX_NAME_LENGTH:]}", line {number}, in {_short(self.code.co_name)}']
        source = _shipped_line(self.code, filename, number)
        if source:
            lines.append(f"    {source}")
        if self.repeats:
            lines.append(f"  [Previous line repeated {self.repeats} more time{'s' * (self.repeats > 1)}]")
        return lines


def is_machinery(filename: str) -> bool:
    """Return whether a file loads or calls the author's code: one of logitship, pickle, dill or importlib."""
    # Unbound: a file name may be a subclass of str.
    return str.startswith(filename, _MACHINERY) or str.endswith(filename, f"dill{os.sep}_dill.py")


def is_shipped_source(filename: str) -> bool:
    """Return whether a file name is that of source from a processor string."""
    return _SHIPPED_SOURCE.fullmatch(filename) is not None


def _shipped_line(code: CodeType, filename: str, number: int | None) -> str:
    """Return a line of source from a processor string, or ""."""
    if number is None:
        return ""
    if not is_shipped_source(filename):
        return scrub(line_of(code, number))[:_MAX_NAME_LENGTH]
    entry: Any = linecache.cache.get(filename, ())
    lines: list[str] = entry[2] if len(entry) == 4 else []
    return scrub(lines[number - 1].strip())[:_MAX_NAME_LENGTH] if 0 < number <= len(lines) else ""


def _reason(error: BaseException) -> tuple[BaseException | None, str]:
    """Return the exception before this one, and Python's sentence between the two."""
    cause, context = _cause_of(error), _context_of(error)
    if cause is not None:
        return cause, "The above exception was the direct cause of the following exception:"
    if _is_context_hidden(error):
        return None, ""
    return context, "During handling of the above exception, another exception occurred:"


def _message(error: BaseException) -> tuple[str, str]:
    """Return the exception's message and "", or "" and why it cannot be read: `str` may run the author's code."""
    try:
        return str(error), ""
    except BaseException as second:  # noqa: BLE001  # boundary: author code
        return "", f"(its message cannot be shown: str() raised {class_name(type(second))})"


def _authors_path(error: BaseException) -> str | None:
    """Return the path in an error of a file operation if the author wrote it; None if it may be one of the server's.

    It is the author's if it is a constant of a function that the exception passed through, or a global that it uses.
    """
    if not any(type(error) is each for each in _FILE_ERRORS):  # `in` compares with `==`, which may be the author's
        return None
    number, problem, path = _file_error(error)
    # `_with_path` formats all three.
    if type(number) is not int or type(problem) is not str or type(path) is not str or len(path) > _MAX_NAME_LENGTH:
        return None
    written = (
        text
        for frame in frames_of(error, _SHOWN_FRAMES)
        if not is_machinery(frame.f_code.co_filename)
        for text in (*frame.f_code.co_consts, *(dict.get(frame.f_globals, name) for name in frame.f_code.co_names))
    )
    return path if any(type(text) is str and text == path for text in written) else None


def _with_path(error: BaseException, path: str) -> str:
    number, problem, _ = _file_error(error)
    return f"[Errno {number}] {scrub(problem)[:_MAX_NAME_LENGTH]}: {path!r}"


def _file_error(error: BaseException) -> tuple[Any, Any, Any]:
    """Return the number, the problem and the path of an error of a file operation. Each may be the author's object."""
    number, problem, path = (OSError.__dict__[name].__get__(error) for name in ("errno", "strerror", "filename"))
    return number, problem, path


def _notes(error: BaseException) -> list[str]:
    """Return the notes added with `add_note`."""
    notes = dict.get(_variables_of(error), "__notes__")  # unbound: may be a subclass of dict
    if type(notes) is not list:
        return []
    return [_short(note, _MAX_NOTE_LENGTH) for note in notes[:_MAX_NOTES] if issubclass(type(note), str)]


def _short(text: str, max_length: int = _MAX_NAME_LENGTH) -> str:
    return scrub(str.__getitem__(text, slice(max_length)))[:max_length]


def _end(text: str) -> str:
    """Return the end of a text, scrubbed."""
    shown = scrub(str.__getitem__(text, slice(-4 * MAX_TEXT_LENGTH, None)))
    if str.__len__(text) <= 4 * MAX_TEXT_LENGTH and len(shown) <= MAX_TEXT_LENGTH:
        return shown
    return f"…{shown[-MAX_TEXT_LENGTH:]}"
