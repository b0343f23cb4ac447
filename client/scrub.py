"""Takes what belongs to this process out of text for somebody else: folders, addresses, control characters.

Error messages of Python and of libraries name the file that they speak of: `cannot import name 'x' from 'torch'
(/srv/llm/.venv/lib/python3.11/site-packages/torch/__init__.py)`. A client is told `torch/__init__.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST_TEXT = 1 << 16
"""Characters that `scrub` reads, and the most that it returns."""

_ADDRESS = re.compile(r"(?<=\bat )0x[0-9a-fA-F]+|0x[0-9a-fA-F]{8,}")
"""Of an object, as `repr` writes it: `<object at 0x7f12a4>`. Shorter numbers elsewhere are colours and flags."""

# All but tab and newline. A terminal obeys the control characters, and no JSON can carry a lone surrogate.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def scrub(text: str) -> str:
    """Text without the folders and the memory of this process.

    - A known folder (see `known_folders`) is taken off the paths in it: `/srv/app/a.py` becomes `a.py`. Where the
      folder stands by itself, `…` stands for it.
    - Addresses of objects become `0x…`.
    - Control characters and lone surrogates become escapes: `\\x1b`, `\\ud800`.

    Meant for honest text: code that knows a folder can always spell it in another way.

    Args:
        text: may be anybody's. What is beyond `LONGEST_TEXT` characters is dropped; the time is linear in the rest.

    Returns:
        A plain `str` of at most `LONGEST_TEXT` characters, which can be encoded as UTF-8.
    """
    # Unbound: of a subclass of str, every method may be the author's code.
    text = str.__getitem__(text, slice(LONGEST_TEXT))
    text = _ADDRESS.sub("0x…", _UNPRINTABLE.sub(_escaped, text))
    folders = _folders()
    text = folders.sub(lambda match: "" if match["slashes"] else "…", text)
    # Once more, for what that may have put together out of the pieces around a path. Nothing comes of `…`.
    return folders.sub("…", text)[:LONGEST_TEXT]


@functools.cache
def known_folders() -> tuple[str, ...]:
    """The folders that `scrub` takes out, longest first; found on the first call.

    They are those of the interpreter and of its modules (`sys.prefix`, `sys.path`, …), of this package, the home folder
    and the current one; each as it is written and with its links resolved.
    """
    found = {folder.rstrip("/") for name in _candidates() for folder in (name, os.path.realpath(name))}
    return tuple(sorted(found - {""}, key=lambda folder: (-len(folder), folder)))


def _candidates() -> Iterator[str]:
    package = Path(__file__).parent.parent
    names = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path]
    names += [str(package), str(Path(__file__).resolve().parent.parent), os.path.expanduser("~")]
    with contextlib.suppress(OSError):  # it was deleted, or may not be looked at
        names.append(os.getcwd())
    for name in names:
        if os.path.isabs(name):  # the others stand for the current folder
            yield os.path.normpath(name)


@functools.cache
def _folders() -> re.Pattern[str]:
    """What finds a known folder: with the slashes after it if it is above a path, without if it stands by itself."""
    folder = "|".join(re.escape(_UNPRINTABLE.sub(_escaped, name)) for name in known_folders())
    return re.compile(rf"(?:{folder})(?:(?P<slashes>/+)(?=[\w.])|(?![\w-]))")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
