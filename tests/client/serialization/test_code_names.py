"""Names read from bytecode."""

from __future__ import annotations

from typing import Any

from logitship.client.serialization.code_names import (
    attribute_chains,
    code_names,
    eager_names,
    global_names,
    imported_modules,
)

TEXT = """
import a.b
from .c import d

@decorated(factor)
class C(Base):
    size = 1
    double = size * other
    items = [each for each in source]

    def method(self, value=default):
        from ..e import f
        global written
        written = h.x.y(lambda: inner) + h.z
        return len(value)
"""


def function(text: str = TEXT) -> Any:
    return compile(text, "x.py", "exec")


def test_module_names() -> None:
    code = function()
    at_once = {"decorated", "factor", "Base", "other", "source", "default"}
    assert eager_names(code) - {"size"} == at_once
    assert code_names(code) - {"size"} == at_once | {"written", "h", "inner", "len"}
    assert "size" not in eager_names(code)


def test_global_names_and_attribute_chains() -> None:
    code = function()
    assert {"h", "written", "inner"} <= global_names(code)
    assert attribute_chains(code, "h") == {("x", "y"), ("z",)}
    assert attribute_chains(code, "inner") == {()}
    assert attribute_chains(code, "nothing") == set()


def test_extended_arguments() -> None:
    lines = "".join(f"    n{i} = g{i}.a{i}\n" for i in range(400))
    code = function(f"def f():\n{lines}")
    assert attribute_chains(code, "g399") == {("a399",)}


def test_imported_modules_are_absolute() -> None:
    assert imported_modules(function(), "top.middle") == {"a.b", "top.middle.c", "top.e"}
