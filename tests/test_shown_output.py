"""The comparison of outputs with what pages show, in `conftest.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PAGE = "'read' 99.06%  -\nand … text"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("'read'   99.06% - and some text", True),
        ("'read' 99.07% - and some text", True),
        ("'read' 99.05% - and\nsome text", True),
        ("'read' 99.08% - and some text", False),
        ("'read' 9.06% - and some text", False),
        ("'read' - - and some text", False),
        ("'real' 99.06% - and some text", False),
        ("'read' 99.06% - and some text more", False),
    ],
)
def test_only_the_last_digit_of_a_percentage_may_differ(
    is_shown: Callable[[str, str], bool], output: str, expected: bool
) -> None:
    assert is_shown(PAGE, output) == expected


def test_other_numbers_are_compared_exactly(is_shown: Callable[[str, str], bool]) -> None:
    assert is_shown("83% of 12.5", "83% of 12.5")
    assert not is_shown("83% of 12.5", "84% of 12.5")
    assert not is_shown("83% of 12.5", "83% of 12.6")
