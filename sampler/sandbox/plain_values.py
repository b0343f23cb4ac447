"""Which values may go into a sandbox: those that `marshal` writes, and whose reading back runs nobody's code."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200
"""Containers in containers. `marshal` itself stops at some thousand, and what reads them recurses."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})
_COLLECTIONS = frozenset({frozenset, list, set, tuple})


class NotPlainError(ValueError):
    """A value is not plain, or is nested too deep. The message says what is wrong with it, not where it came from."""


def check_plain(value: Any) -> None:
    """Refuse what is not made of dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool and None.

    A subclass is none of these: `marshal` refuses an `OrderedDict`, and of a `numpy.float64` it writes only the bytes.

    Raises:
        NotPlainError: names the type, or the depth.
    """
    # Which containers were seen, and how deep at most: one that many share is not walked through once for each.
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
