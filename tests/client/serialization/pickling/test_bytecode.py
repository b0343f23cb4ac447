"""Detection of bytecode of another Python version, and of damaged bytecode."""

from __future__ import annotations

import argparse
import ast
import asyncio.base_events
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitship import ProcessorLoadError
from logitship.client.serialization.code_names import walk
from logitship.client.serialization.pickling.bytecode import check_code

FIELDS = """
argcount posonlyargcount kwonlyargcount nlocals stacksize flags code consts names varnames filename name qualname
firstlineno linetable exceptiontable freevars cellvars
"""


def arguments(function: types.CodeType, /, **changed: Any) -> list[Any]:
    """Return the arguments that dill passes to `_create_code`."""
    return [changed.get(field, getattr(function, f"co_{field}")) for field in FIELDS.split()]


def standard_library() -> Iterator[types.CodeType]:
    for module in (argparse, ast, asyncio.base_events, random):
        yield from walk(compile(Path(module.__file__ or "").read_text(), module.__name__, "exec"))


def test_own_bytecode_is_accepted() -> None:
    codes = list(standard_library())
    assert len(codes) > 500
    for code in codes:
        check_code(arguments(code))
        check_code([b"lnotab", *arguments(code)])


def test_damaged_bytecode_is_refused() -> None:
    for code in list(standard_library())[:200]:
        for damaged in (code.co_code[:-1], b"", b"\xff\x00" + code.co_code):
            with pytest.raises(ProcessorLoadError, match="bytecode of another Python version"):
                check_code(arguments(code, code=damaged))


def test_out_of_range_operands_are_refused() -> None:
    code = test_out_of_range_operands_are_refused.__code__
    for field in ("consts", "names", "varnames"):
        with pytest.raises(ProcessorLoadError):
            check_code(arguments(code, **{field: ()}))


def test_fewer_fields_mean_older_python() -> None:
    code = test_fewer_fields_mean_older_python.__code__
    with pytest.raises(ProcessorLoadError, match=r"Python 3\.10 or older"):
        check_code(arguments(code)[2:])
