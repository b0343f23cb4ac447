"""Plain values: those that `marshal` can write, and that run no code when they are read back in a sandbox."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200
"""Nesting depth of containers. `marshal` itself stops at some thousand, and readers recurse."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})
_COLLECTIONS = frozenset({frozenset, list, set, tuple})


class NotPlainError(ValueError):
    """A value is not plain, or is nested too deep. The message is a sentence without its subject."""


def check_plain(value: Any) -> None:
    """Refuse values not made of dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool and None.

    Subclasses are refused too: `marshal` cannot write an `OrderedDict`, and writes a `numpy.float64` as its bytes.

    Raises:
        NotPlainError: names the type, or the depth.
    """
    # Containers seen, with their greatest depth: a shared container is not traversed again.
    seen: dict[int, int] = {}
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        value, depth = waiting.pop()
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is not dict and kind not in _COLLECTIONS:
            raise NotPlainError(
                f"holds a value of type {_name(kind)}: a sandbox takes plain values only, such as JSON has"
            )
        if depth == MAX_DEPTH:
            raise NotPlainError(f"is nested deeper than {MAX_DEPTH} levels")
        if seen.get(id(value), -1) >= depth:
            continue
        seen[id(value)] = depth
        for held in (value, value.values()) if kind is dict else (value,):
            if not _ATOMS.issuperset(map(type, held)):
                waiting.extend((each, depth + 1) for each in held)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
