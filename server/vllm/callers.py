"""Finds the object of vLLM's that called.

vLLM gives a plugin's class method a request's parameters and nothing of the model, and its constructor nothing of the
batch that it will follow. Both callers stand on the stack, and there is no other way to them.
"""

from __future__ import annotations

import sys
from typing import Any


def calling(class_name: str) -> Any:
    """The `self` of the nearest caller whose class, or a base class of it, has this name; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and any(cls.__name__ == class_name for cls in type(caller).__mro__):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def argument_of_caller(name: str) -> Any:
    """The value of the argument of this name that the nearest caller with such a one was given; None if none was."""
    frame = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None
