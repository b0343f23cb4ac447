"""Removal of folders, memory addresses and control characters from text for clients.

Error messages of Python and of libraries contain file paths of the server: `cannot import name 'x' from 'torch'
(/srv/llm/.venv/lib/python3.11/site-packages/torch/__init__.py)`. A client only sees `torch/__init__.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_TEXT_LENGTH = 1 << 16
"""Maximum number of characters that `scrub` reads and returns."""

_ADDRESS = re.compile(r"(?<=\bat )0x[0-9a-fA-F]+|0x[0-9a-fA-F]{8,}")
"""Address of an object, as in `repr`: `<object at 0x7f12a4>`. Shorter numbers elsewhere are colors and flags."""

# All but tab and newline. Terminals interpret control characters, and JSON cannot contain lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def scrub(text: str) -> str:
    r"""Remove folders and memory addresses of this process from the text.

    - A known folder (see `known_folders`) is removed from paths: `/srv/app/a.py` becomes `a.py`. A folder by itself
      becomes `…`.
    - Addresses of objects become `0x…`.
    - Control characters and lone surrogates become escapes: `\x1b`, `\ud800`.

    Not a protection against hostile code: code that knows a folder can always encode it in another way.

    Args:
        text: untrusted text. Characters beyond `MAX_TEXT_LENGTH` are dropped; the time is linear in the rest.

    Returns:
        A plain `str` of at most `MAX_TEXT_LENGTH` characters that can be encoded as UTF-8.
    """
    # Unbound: every method of a subclass of str may be the author's code.
    text = str.__getitem__(text, slice(MAX_TEXT_LENGTH))
    text = _ADDRESS.sub("0x…", _UNPRINTABLE.sub(_escaped, text))
    folders = _folders()
    text = folders.sub(lambda match: "" if match["slashes"] else "…", text)
    # Once more: removing a folder may have joined the text around it to another one. `…` cannot form a path.
    return folders.sub("…", text)[:MAX_TEXT_LENGTH]


@functools.cache
def known_folders() -> tuple[str, ...]:
    """Return the folders that `scrub` removes, longest first; cached.

    These are the folders of the interpreter and its modules (`sys.prefix`, `sys.path`, …), of this package, the home
    folder and the current folder; each as written and with symbolic links resolved.
    """
    found = {folder.rstrip("/") for name in _candidates() for folder in (name, os.path.realpath(name))}
    return tuple(sorted(found - {""}, key=lambda folder: (-len(folder), folder)))


def _candidates() -> Iterator[str]:
    package = Path(__file__).parent.parent
    names = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sys.path]
    names += [str(package), str(Path(__file__).resolve().parent.parent), os.path.expanduser("~")]
    with contextlib.suppress(OSError):  # deleted or not readable
        names.append(os.getcwd())
    for name in names:
        if os.path.isabs(name):  # the others mean the current folder
            yield os.path.normpath(name)


@functools.cache
def _folders() -> re.Pattern[str]:
    """Return the pattern of a known folder, including the slashes after it if it is part of a path."""
    folder = "|".join(re.escape(_UNPRINTABLE.sub(_escaped, name)) for name in known_folders())
    return re.compile(rf"(?:{folder})(?:(?P<slashes>/+)(?=[\w.])|(?![\w-]))")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
