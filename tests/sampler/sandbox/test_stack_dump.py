from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.client import author_errors
from logitship.client.author_errors import MAX_TEXT_LENGTH
from logitship.sampler.sandbox.stack_dump import traceback_of

LINES = ["def a():", "    b()", "  c()  "]


def source(filename: str, number: int) -> str:
    return LINES[number - 1] if filename.startswith("<logitship") and number <= len(LINES) else ""


def dump(*frames: str) -> bytes:
    return "\n".join(["Current thread 0x00007f0 (most recent call first):", *frames, ""]).encode()


def test_frames_of_the_author_innermost_last() -> None:
    found = traceback_of(
        dump(
            f'  File "{sys.prefix}/lib/python3.11/re/__init__.py", line 176 in match',
            '  File "<logitship_processor_7>", line 3 in b',
            '  File "<logitship_processor_7>", line 2 in a',
            f'  File "{author_errors.__file__}", line 5 in edit',
            '  File "<string>", line 1 in <module>',
        ),
        source,
    )
    *lines, advice = found.splitlines()
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<logitship_processor_7>", line 2, in a',
        "    b()",
        '  File "<logitship_processor_7>", line 3, in b',
        "    c()",
        '  File "lib/python3.11/re/__init__.py", line 176, in match',
    ]
    assert advice.startswith("TimeoutError: ")


@pytest.mark.parametrize(
    "nothing",
    [
        b"",
        b"Current thread 0x0 (most recent call first):\n",
        dump('  File "a.py", line x in f'),
        dump(f'  File "{author_errors.__file__}", line 5 in edit'),
    ],
)
def test_nothing_of_the_author(nothing: bytes) -> None:
    assert traceback_of(nothing, source) == ""


def test_file_of_the_author_and_line_that_does_not_exist() -> None:
    found = traceback_of(
        dump('  File "try.py", line 16 in __call__', '  File "<logitship_processor_7>", line 9 in a'), source
    )
    assert found.splitlines()[1:3] == [
        '  File "<logitship_processor_7>", line 9, in a',
        '  File "try.py", line 16, in __call__',
    ]


def test_it_is_bounded() -> None:
    frame = f'  File "{"a" * 400}", line 1 in {"f" * 100}'
    found = traceback_of(dump(*[frame] * 10_000), source)
    assert len(found) <= MAX_TEXT_LENGTH
    assert found.endswith("sandbox_load_timeout.\n")


@given(
    st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda text: dump(f'  File "{text}", line 1 in f')))
)
def test_anything(data: bytes) -> None:
    found = traceback_of(data, source)
    assert len(found) <= MAX_TEXT_LENGTH
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", found)
