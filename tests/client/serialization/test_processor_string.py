"""Parsing and writing of processor strings, without running anything."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from logitship import ProcessorLoadError
from logitship.client.serialization.processor_string import (
    PYTHON,
    InstalledProcessor,
    LineRange,
    Listing,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
    parse,
    source_lines,
    to_text,
)

SEPARATORS = "\x0c\na = '\u2028\x1c\x85'\r\nb = 1\rc = 2\nd"
"""Lines 2, 3 and 4 assign `a`, `b` and `c`; `str.splitlines` finds more lines."""

DIGEST = "sha256:" + "0123456789abcdef" * 4
SOURCE = SourceProcessor("class A: ...", "A", b"\x80\x04}.", "3.12")


@pytest.mark.parametrize(
    "string",
    [
        PickledProcessor(b"\x80\x04."),
        PickledProcessor(b"x", python="3.12", dill="0.4.1", source=SOURCE, params_schema={"type": "object"}, name="A"),
        PickledProcessor(b"x", python="3.12", name="A"),
        PickledProcessor(
            b"x", "3.12", source=SOURCE, name="A", listing=Listing("class A: ...", (LineRange("a.py", 3, 1, 1),))
        ),
        PickledProcessor(b"x", listing=Listing("a\nb", (LineRange("a b:c.py", 3, 1, 1), LineRange("d", 1, 2, 1)))),
        SourceProcessor("class A: ...", "A"),
        RegisteredProcessor(DIGEST),
        InstalledProcessor("module:Class"),
    ],
)
def test_round_trip(string: ProcessorString) -> None:
    assert parse(to_text(string)) == string
    assert parse(to_text(string).encode()) == string


def test_minimal_form_equals_sglang_form() -> None:
    assert json.loads(to_text(PickledProcessor(b"\x80\x04."))) == {"callable": "80042e"}


def test_source_form_rejects_captured_values() -> None:
    with pytest.raises(ValueError, match="cannot contain captured values"):
        to_text(SOURCE)


def test_digest_covers_executed_code() -> None:
    pickled = PickledProcessor(b"x", python=PYTHON, source=SOURCE, name="A")
    assert pickled.runnable is pickled
    assert pickled.digest == PickledProcessor(b"x").digest
    other = PickledProcessor(b"x", python="2.7", source=SOURCE)
    assert other.runnable is SOURCE
    parts = ("class A: ...", "A", b"1"), ("class A: ...A", "", b"1"), ("class A: ...", "A", b"")
    assert len({SourceProcessor(*part).digest for part in parts}) == 3


def pickled(**about: Any) -> str:
    return json.dumps({"callable": "80", "logitship": {"v": 1, **about}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "none of the keys"),
        ('{"callable": ""}', "'callable' is empty"),
        ('{"callable": "xyz"}', "'callable' is not a string of hexadecimal digits"),
        ('{"callable": 3}', "'callable' is not a string of hexadecimal digits"),
        ('{"callable": "80", "more": 1}', r"unknown keys next to 'callable': \['more'\]"),
        ('{"callable": "80", "logitship": 1}', "'logitship' is not a JSON object"),
        ('{"callable": "80", "logitship": {"v": 9}}', r"'logitship.v' is 9: this version reads 1"),
        (
            f'{{"callable": "80", "logitship": {{"v": {"[" * 1000}{"]" * 1000}}}}}',
            r"'logitship.v' is list: this version",
        ),
        (pickled(python=3), "'python' is missing, empty or not a string"),
        (pickled(name=3), "'name' is missing, empty or not a string"),
        (pickled(source="x"), "'name' is missing, empty or not a string"),
        (pickled(source="x", name="A", captured="q"), "'captured' is not a string of hexadecimal digits"),
        (pickled(lines=3, listing="a"), "'lines' is missing, empty or not a string"),
        (pickled(lines="a.py:1:1:1"), "has no ranges of lines of 'listing' or 'source'"),
        (pickled(lines="a.py:0:1:1", listing="a"), "has no ranges of lines"),
        (pickled(lines="a.py:1:1:99999999", listing="a"), "has no ranges of lines"),
        (pickled(lines="\n".join(["a.py:1:1:1"] * 1001), listing="a"), "has no ranges of lines"),
        (pickled(params_schema=[]), r"'logitship.params_schema' is not a JSON object"),
        ('{"source": "x"}', "'class_name' is missing"),
        ('{"source": "", "class_name": "A"}', "'source' is missing, empty"),
        ('{"digest": "sha256:12"}', "'digest' is not 'sha256:' and 64 hexadecimal digits"),
        ('{"name": ""}', "'name' is missing, empty"),
        ('{"name": "a", "v": 1}', "unknown keys next to 'name'"),
    ],
)
def test_malformed_strings(text: str, message: str) -> None:
    with pytest.raises(ProcessorLoadError, match=message):
        parse(text)


def test_listing_finds_lines() -> None:
    ranges = LineRange("a.py", 10, 2, 2), LineRange("b.py", 1, 3, 9), LineRange("a.py", 11, 1, 1)
    listing = Listing("one\n  two\nthree", ranges)
    assert [listing.line("a.py", number) for number in (9, 10, 12)] == ["", "two", ""]
    assert listing.line("a.py", 11) == ""  # two files of this name
    assert [listing.line("b.py", number) for number in (1, 2, 9)] == ["three", "", ""]
    assert listing.line("c.py", 1) == ""


def test_source_lines_are_those_of_python() -> None:
    lines = source_lines(SEPARATORS)
    assert lines == ["\x0c\n", "a = '\u2028\x1c\x85'\n", "b = 1\n", "c = 2\n", "d"]
    assert [(each.lineno, lines[each.lineno - 1][0]) for each in ast.parse(SEPARATORS).body] == [
        (2, "a"),
        (3, "b"),
        (4, "c"),
        (5, "d"),
    ]
    listing = Listing(SEPARATORS, (LineRange("a.py", 11, 1, 5),))
    assert listing.line("a.py", 13) == "b = 1"
