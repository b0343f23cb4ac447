"""Which names the text of a function or class sees."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from .class_names import captured_values, functions_of
from .source_layout import NoSource
from .source_text import Definition


@dataclass
class Scope:
    """Where the names in a piece of text are looked up.

    Attributes:
        variables: the module's globals.
        local: names of an enclosing function that the text uses.
    """

    variables: dict[str, Any]
    local: dict[str, Any] = field(default_factory=dict)


def scope_of(value: Any, node: Definition, filename: str) -> Scope:
    """Where the names in the text of a function or class are looked up."""
    if not isinstance(value, type):
        function: Any = inspect.unwrap(value)
        return Scope(
            getattr(function, "__globals__", {}),
            captured_values(function) if isinstance(function, FunctionType) else {},
        )
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    functions = [inspect.unwrap(function) for function in functions_of(value)]
    written = [f for f in functions if f.__code__.co_filename == filename and f.__code__.co_firstlineno in lines]
    local = {base.__name__: base for base in value.__bases__}
    for function in written:
        for name, captured in captured_values(function).items():
            if local.setdefault(name, captured) is not captured:
                raise NoSource
    local.pop("__class__", None)
    variables = written[0].__globals__ if written else vars(sys.modules.get(value.__module__, ModuleType("")))
    return Scope(variables, {name: v for name, v in local.items() if variables.get(name) is not v})
