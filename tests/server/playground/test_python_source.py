"""Parsing of sources and of error messages on the page."""

from __future__ import annotations

import pytest

from .conftest import Playground

BASE = "CustomLogitProcessor"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("", ""),
        ("x = 1", ""),
        ("class A: ...", "A"),
        (f"class A({BASE}): ...", "A"),
        (f"class A({BASE}): ...\nclass Helper: ...", "A"),
        (f"class A({BASE}): ...\nclass B(A): ...\n", "B"),
        (f"class A({BASE}): ...\nclass B({BASE}): ...\n", "B"),
        (f"class A(client.{BASE}): ...\nclass B: ...", "A"),
        (f"class A(Mixin, {BASE}, metaclass=M): ...\nclass B: ...", "A"),
        (f"@decorated\nclass A({BASE}): ...\nclass B: ...", "A"),
        (f'"""\nclass No({BASE}): ...\n"""\nclass A({BASE}): ...', "A"),
        (f"# class No({BASE}): ...\nclass A({BASE}):\n    class Inner: ...\n", "A"),
        (f"class A({BASE}): ...\ndef f():\n    class Inner({BASE}): ...\n", "A"),
        (f"class A({BASE}:\n    broken", "A"),
    ],
)
def test_processor_class(source: str, name: str, playground: Playground) -> None:
    found = playground.page.evaluate(
        "async (source) => (await import('/playground/python_source.js')).processorClass(source)", source
    )
    assert found == name


@pytest.mark.parametrize(
    ("message", "traceback", "line"),
    [
        ("raised", 'File "<logitship_processor_12>", line 7, in __call__\nFile "/torch/x.py", line 99, in f\n', 7),
        ("raised", 'File "<logitship_processor_0>", line 7, in a\nFile "<logitship_processor_0>", line 3, in b\n', 3),
        ("the source is not valid Python 3.11: line 5: invalid syntax", "", 5),
        ('raised while it was loaded: x\nFile "<logitship_processor_0>", line 2, in <module>\n', "", 2),
        ("the queue is full, line 4", "", 0),
        ("raised", 'File "x.py", line 3, in b\n', 0),
    ],
)
def test_line_of_error(message: str, traceback: str, line: int, playground: Playground) -> None:
    found = playground.page.evaluate(
        "async ([message, traceback]) => (await import('/playground/python_source.js')).lineOf(message, traceback)",
        [message, traceback],
    )
    assert found == line
