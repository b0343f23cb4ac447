"""Which functions a class is made of, and which global names they lack."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from .code_names import global_names
from .provenance import is_installed


def functions_of(cls: type) -> Iterator[FunctionType]:
    """The functions in a class's own body: methods, and those inside of properties and other wrappers."""
    for value in list(cls.__dict__.values()):
        yield from functions_in(value)


def missing_globals(cls: type) -> list[str]:
    """Global names that the class's code, and the helpers it reaches, use but that exist nowhere; sorted.

    One that stands in a branch that never runs does no harm, so this is no reason to refuse a class.
    """
    missing: set[str] = set()
    seen: set[int] = set()
    waiting = [function for base in cls.__mro__ if not is_installed(base.__module__) for function in functions_of(base)]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for name in global_names(function.__code__):
            if name in function.__globals__:
                waiting.extend(_own(functions_in(function.__globals__[name])))
            elif not hasattr(builtins, name):
                missing.add(name)
        for value in captured_values(function).values():
            waiting.extend(_own(functions_in(value)))
    return sorted(missing)


def captured_values(function: FunctionType) -> dict[str, Any]:
    """What a closure holds, by variable name; variables that are not assigned yet are left out."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return values


def _own(functions: Iterator[FunctionType]) -> Iterator[FunctionType]:
    return (function for function in functions if not is_installed(function.__globals__.get("__name__")))


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The function that a method descriptor or another wrapper holds, or that the value is."""
    match value:
        case FunctionType():
            yield value
        case staticmethod() | classmethod() | MethodType():
            yield from functions_in(value.__func__)
        case property():
            for part in (value.fget, value.fset, value.fdel):
                yield from functions_in(part)
        case functools.cached_property() | functools.partial() | functools.partialmethod():
            yield from functions_in(value.func)
        case functools._lru_cache_wrapper():
            yield from functions_in(value.__wrapped__)
