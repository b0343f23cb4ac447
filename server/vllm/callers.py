"""Access to the vLLM objects that call the plugin.

vLLM passes a plugin's class method the parameters of a request and nothing about the model, and its constructor nothing
about the batch. Both are attributes of callers on the stack, and there is no other way to reach them.
"""

from __future__ import annotations

import sys
from typing import Any

SCHEDULED = "scheduler_output"
"""Name of the argument with the scheduler's plan for a step, in methods of both model runners."""


def find_caller(class_name: str) -> Any:
    """Return the `self` of the nearest caller whose class, or a base class of it, has this name; else None."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not None and any(cls.__name__ == class_name for cls in type(caller).__mro__):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def find_caller_argument(name: str) -> Any:
    """Return the argument of this name of the nearest caller that has one; None if no caller has."""
    frame = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None
