"""Names that code objects use, read from their bytecode, and the functions of a class."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from types import CodeType, FunctionType, MethodType
from typing import Any

from .provenance import is_installed

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Every module has them, each its own.
_MODULE_OWN = frozenset({"__name__", "__builtins__", "__annotations__", "__conditional_annotations__"})


def walk(code: CodeType) -> Iterator[CodeType]:
    """Yield the code object and those nested in it: inner functions, lambdas, comprehensions, class bodies."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from walk(constant)


def global_names(code: CodeType) -> set[str]:
    """Return the names looked up in the module's globals; may include names of a nested class body."""
    names = {str(op.argval) for inner in walk(code) for op in _operations(inner) if op.opname in _GLOBAL_OPS}
    return names - _MODULE_OWN


def eager_names(code: CodeType) -> set[str]:
    """Return the names that a module's code looks up while it is executed, without those it binds itself.

    Class bodies run immediately, and so do comprehensions and lambdas at that level; functions do not.
    """
    names = _own_names(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_function = constant.co_flags & inspect.CO_OPTIMIZED and not constant.co_name.startswith("<")
            names |= set() if is_function else eager_names(constant)
    return names - _MODULE_OWN


def code_names(code: CodeType) -> set[str]:
    """Return all names that a module's code looks up, immediately or later, without those it binds itself."""
    names = _own_names(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= code_names(constant)
    return names - _MODULE_OWN


def _own_names(code: CodeType) -> set[str]:
    operations = list(_operations(code))
    bound = {op.argval for op in operations if op.opname == "STORE_NAME"}
    return {str(op.argval) for op in operations if op.opname in _GLOBAL_OPS} - bound


def attribute_chains(code: CodeType, name: str) -> set[tuple[str, ...]]:
    """Return the attributes used of a global: `{("nn", "Linear"), ("inf",)}` for `torch.nn.Linear` and `torch.inf`.

    A use without an attribute gives the empty tuple.
    """
    chains = set()
    for inner in walk(code):
        chain: list[str] | None = None
        for op in _operations(inner):
            if chain is not None:
                if op.opname in _ATTRIBUTE_OPS:
                    chain.append(str(op.argval))
                    continue
                chains.add(tuple(chain))
                chain = None
            if op.opname in _GLOBAL_OPS and op.argval == name:
                chain = []
    return chains


def imported_modules(code: CodeType, package: str | None) -> set[str]:
    """Return the absolute names of the modules that the code imports when it runs.

    Args:
        code: the code object of a function.
        package: package of the function's module, to resolve relative imports.
    """
    modules = set()
    for inner in walk(code):
        operations = list(_operations(inner))
        for index, op in enumerate(operations):
            if op.opname == "IMPORT_NAME":
                level = operations[
                    index - 2
                ].argval  # the two instructions before load the level and the imported names
                name = "." * level + op.argval
                modules.add(resolve_name(name, package) if level and package else op.argval)
    return modules


def _operations(code: CodeType) -> Iterator[dis.Instruction]:
    return (op for op in dis.get_instructions(code) if op.opname != "EXTENDED_ARG")


def functions_of(cls: type) -> Iterator[FunctionType]:
    """Yield the functions in a class's own body: methods, and those inside properties and other wrappers."""
    for value in list(cls.__dict__.values()):
        yield from functions_in(value)


def missing_globals(cls: type) -> list[str]:
    """Return the undefined global names used by the class's code and the helpers it reaches; sorted.

    A name in a branch that never runs does no harm, so this is no reason to refuse a class.
    """
    functions = reached_functions(cls, lambda module_name: not is_installed(module_name))
    used = {name for each in functions for name in global_names(each.__code__) - each.__globals__.keys()}
    return sorted(name for name in used if not hasattr(builtins, name))


def reached_functions(cls: type, is_own: Callable[[str | None], bool]) -> list[FunctionType]:
    """Return the functions of the class and its bases, and the functions that these use.

    Args:
        cls: the class.
        is_own: returns whether functions of a module with this name are wanted.
    """
    reached: dict[FunctionType, None] = {}
    waiting = [function for base in cls.__mro__ if is_own(base.__module__) for function in functions_of(base)]
    while waiting:
        function = waiting.pop()
        if function in reached:
            continue
        reached[function] = None
        values = [function.__globals__.get(name) for name in global_names(function.__code__)]
        used = (inner for value in [*values, *captured_values(function).values()] for inner in functions_in(value))
        waiting += [inner for inner in used if is_own(inner.__globals__.get("__name__"))]
    return list(reached)


def captured_values(function: FunctionType) -> dict[str, Any]:
    """Return the values of a closure by variable name, without variables that are not assigned yet."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return values


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the value if it is a function, or the functions inside a method descriptor or another wrapper."""
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
