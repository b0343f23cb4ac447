"""Finds classes that could tell promised logits from real ones, before they are called."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_NAMES = {
    "_make_wrapper_subclass": "it makes tensor classes of its own",
    "DisableTorchFunctionSubclass": "it switches off tensor classes",
    "_DisableTorchDispatch": "it switches off tensor classes",
    "TorchDispatchMode": "it uses torch's dispatch modes",
    "FakeTensorMode": "it uses torch's dispatch modes",
    "FlopCounterMode": "it uses torch's dispatch modes",
    "TorchFunctionMode": "it uses torch's function modes",
    # In a part of a call only: as a decorator of the whole call it makes no difference, and is not seen here.
    "inference_mode": "it uses torch.inference_mode",
    "functorch": "it uses functorch",
    "swap_tensors": "it swaps tensors",
    "_dynamo": "it uses torch._dynamo",
    "settrace": "it traces its execution",
    "setprofile": "it traces its execution",
}
_STORED = {"data": "it replaces the data of a tensor", "__class__": "it replaces the class of an object"}
_OF_TORCH = {"compile": "it uses torch.compile", "jit": "it uses torch.jit"}
_COMPARISONS = frozenset({"IS_OP", "COMPARE_OP", "CONTAINS_OP"})
_ENDS = ("STORE_", "POP_", "RETURN_", "JUMP_", "FOR_ITER")
"""Beginnings of the names of instructions that end an expression."""


def reason_against_promises(cls: type) -> str:
    """Return why a class must be called with real logits; "" if nothing is known against promises.

    Looks at the code of its methods and of the functions that they refer to as globals, not at what it runs.

    Args:
        cls: a processor class.
    """
    for code in _codes(cls):
        for name in code.co_names:
            if name in _NAMES:
                return _NAMES[name]
        reason = _reason_in(code)
        if reason:
            return reason
    return ""


def _reason_in(code: CodeType) -> str:
    """Return why this code cannot be called with promised logits; "" if it can."""
    is_type_known = False  # in the expression so far, `type` is called, or `__class__` is used
    of_torch = ""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD") and of_torch == "torch" and each.argval in _OF_TORCH:
            return _OF_TORCH[each.argval]
        if each.opname == "STORE_ATTR" and each.argval in _STORED:
            return _STORED[each.argval]
        of_torch = str(each.argval) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") else ""
        if of_torch == "type" or (each.opname == "LOAD_ATTR" and each.argval == "__class__"):
            is_type_known = True
        elif each.opname.startswith("STORE_") and is_type_known and "Tensor" in code.co_names:
            return _TYPE  # `kind = type(logits)`, to be compared
        elif each.opname.startswith(_ENDS):
            is_type_known = False
        elif is_type_known and each.opname in _COMPARISONS:
            return _TYPE
    return ""


_TYPE = "it compares the type of an object"


def _codes(cls: type) -> Iterator[CodeType]:
    """Yield the code of everything that a class may run, each once."""
    seen: set[int] = set()
    waiting: list[Any] = [value for base in cls.__mro__ if base is not object for value in vars(base).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif isinstance(value, FunctionType) and not _is_library(value) and id(value) not in seen:
            seen.add(id(value))  # it may call itself
            waiting.append(value.__code__)
            waiting += [value.__globals__.get(name) for name in value.__code__.co_names]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif isinstance(value, CodeType) and id(value) not in seen:
            seen.add(id(value))
            yield value
            waiting += value.co_consts
        elif isinstance(value, type) and getattr(value, "__module__", None) == cls.__module__ and id(value) not in seen:
            seen.add(id(value))
            waiting += vars(value).values()


def _is_library(function: FunctionType) -> bool:
    """Return whether a function belongs to an installed package, whose code works with any tensor."""
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in _LIBRARIES


_LIBRARIES = {"torch", "numpy", "logitship", "transformers"}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True
