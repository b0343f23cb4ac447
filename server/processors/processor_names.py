"""Names of registered processors: `Lipogram` is the newest version, `Lipogram@2` the second."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NAME_RULE = "a letter or '_', then at most 63 letters, digits, '_', '.' and '-'"

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_REFERENCE = re.compile(rf"({_NAME})(?:@([1-9][0-9]{{0,8}}))?")
_SHOWN = 80
"""Most characters of a client's text in a message."""
_LISTED = 20
"""Most names in a message."""


@dataclass(frozen=True)
class Versions:
    """Versions of a name.

    Attributes:
        kept: the versions that are registered now, the oldest first.
        last: the highest version number used so far.
    """

    kept: tuple[int, ...]
    last: int


def is_name(text: str) -> bool:
    """Return whether a processor may be registered under this name."""
    return re.fullmatch(_NAME, text) is not None


def split_reference(text: str) -> tuple[str, int | None] | None:
    """Return the name and version of `Lipogram@2`, the name and None of `Lipogram`; None if the text is neither."""
    match = _REFERENCE.fullmatch(text)
    return None if match is None else (match[1], int(match[2]) if match[2] else None)


def missing_message(reference: str, installed: Iterable[str], registered: Mapping[str, Versions]) -> str:
    """Return the error message for a name or digest without a processor.

    Args:
        reference: the client's text.
        installed: the names of the installed processors.
        registered: the names that the tenant's processors have, or had.
    """
    name, version = split_reference(reference) or (reference.partition("@")[0], None)
    known = registered.get(name)
    if known is None:
        return _unknown(reference, name, installed, [name for name, versions in registered.items() if versions.kept])
    if version is not None and version > known.last:
        return f"{name}@{version} was never registered: the last version of {name} is {known.last}"
    kept = ", ".join(f"{name}@{number}" for number in known.kept[-_LISTED:])
    if "@" in reference and version is None:
        return f"{reference[:_SHOWN]!r} names no version: write a number after the @. Registered are: {kept or 'none'}"
    return f"{reference} is not registered any more: it was deleted, or evicted to make space for others. " + (
        f"Registered are: {kept}" if kept else "Register it again, or send the whole processor string"
    )


def _unknown(reference: str, name: str, installed: Iterable[str], registered: list[str]) -> str:
    installed = list(installed)
    # difflib takes up to a fifth of a millisecond for each name, and this runs on the event loop.
    likely = sorted(registered, key=lambda known: abs(len(known) - len(name)))[:_LISTED]
    close = difflib.get_close_matches(name[:_SHOWN], installed + likely, n=3)
    text = f"no processor is installed or registered as {reference[:_SHOWN]!r}"
    text += f", did you mean {' or '.join(close)}? Installed" if close else "; installed"
    text += f" are: {', '.join(installed) or 'none'}"
    if registered:
        more = len(registered) - _LISTED
        text += f"; registered are: {', '.join(sorted(registered)[:_LISTED])}{f' and {more} more' if more > 0 else ''}"
    return text
