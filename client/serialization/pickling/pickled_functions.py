"""Pickling of the author's functions: created bare, then filled, so that they may refer to themselves anywhere.

These are handlers of `ClassPickler`.
"""

from __future__ import annotations

import functools
import operator
import types
from contextlib import AbstractContextManager, nullcontext
from pathlib import PurePath
from typing import Any

import dill._dill

from .pickled_modules import ModulePickler
from .reductions import annotations_as_text

_SINGLE_DISPATCH = next(
    code
    for code in functools.singledispatch.__code__.co_consts
    if isinstance(code, types.CodeType) and code.co_name == "wrapper"
)
_MADE_BY_SINGLE_DISPATCH = frozenset({"_clear_cache", "dispatch", "register", "registry"})
"""Attributes that `functools.singledispatch` sets."""


def save_function(pickler: ModulePickler, function: types.FunctionType) -> None:
    """Write a function: by name if it is installed, else by value."""
    if pickler.is_by_name(function):
        pickler.save_global(function)
        return
    pickler.check_code_allowed(function)
    if function.__code__ is _SINGLE_DISPATCH:
        _save_single_dispatch(pickler, function)
        return
    globals_proxy = pickler.modules.namespace(function.__globals__).proxy
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    new_cells = [(name, cell) for name, cell in cells if id(cell) not in pickler.memo]
    bare = (function.__code__, globals_proxy, function.__name__, None, function.__closure__)
    pickler.save_reduce(dill._dill._create_function, bare, obj=function)
    for name, cell in new_cells:
        _fill_cell(pickler, function, name, cell)
    pickler.modules.add_globals(function)
    _set_attributes(pickler, function)


def _save_single_dispatch(pickler: ModulePickler, function: types.FunctionType) -> None:
    """Let `functools.singledispatch` create the function, then register its implementations.

    It has a cache of weak references, and its code is that of the standard library.
    """
    attributes = vars(function)
    stand_in = types.SimpleNamespace(__name__=function.__name__)  # the implementations may refer to the function
    pickler.save_reduce(functools.singledispatch, (stand_in,), obj=function)
    for cls, implementation in attributes["registry"].items():
        label = f"implementation of {function.__qualname__} for {cls.__qualname__}"
        with pickler.at(label, implementation):
            pickler.call(operator.methodcaller("register", cls, implementation), function)
    _set_attributes(pickler, function)


def save_cell(pickler: ModulePickler, cell: types.CellType) -> None:
    """Write an empty cell: `_fill_cell` fills it once the function exists, because its value may be that function."""
    pickler.save_reduce(types.CellType, (), obj=cell)


def save_code(pickler: ModulePickler, code: types.CodeType) -> None:
    """Write a code object, with its file name but not the folder."""
    args = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_nlocals,
        code.co_stacksize,
        code.co_flags,
        code.co_code,
        code.co_consts,
        code.co_names,
        code.co_varnames,
        PurePath(code.co_filename).name,
        code.co_name,
        code.co_qualname,
        code.co_firstlineno,
        code.co_linetable,
        code.co_exceptiontable,
        code.co_freevars,
        code.co_cellvars,
    )
    pickler.save_reduce(dill._dill._create_code, args, obj=code)


def _fill_cell(pickler: ModulePickler, function: types.FunctionType, name: str, cell: types.CellType) -> None:
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return
    with _at(pickler, f"variable {name!r} captured by", function, value):
        pickler.call(setattr, cell, "cell_contents", value)


def _set_attributes(pickler: ModulePickler, function: types.FunctionType) -> None:
    descriptive: dict[str, Any] = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__annotations__": annotations_as_text(function),
    }
    pickler.build({name: value for name, value in descriptive.items() if value})
    for name in ("__defaults__", "__kwdefaults__"):
        value = getattr(function, name)
        if value:
            with _at(pickler, "a default argument of", function, value):
                pickler.call(setattr, function, name, value)
    made = _MADE_BY_SINGLE_DISPATCH if function.__code__ is _SINGLE_DISPATCH else ()
    for name, value in function.__dict__.items():
        if name not in made:
            with _at(pickler, f"attribute {name!r} of function", function, value):
                pickler.call(setattr, function, name, value)


def _at(
    pickler: ModulePickler, relation: str, function: types.FunctionType, value: Any
) -> AbstractContextManager[None]:
    """Label a part of a function. What is inside of a library's function is only known to that library."""
    if pickler.is_own(function.__globals__.get("__name__")):
        return pickler.at(f"{relation} {function.__qualname__}", value)
    return nullcontext()
