from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.builtin_processors.parts.string_contain import StringContainAutomaton

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "rtp_llm.json").read_text())["string_contain_dfa"]
tokens = st.lists(st.integers(0, 2), max_size=12)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["name"])
def test_recorded(case: dict[str, Any]) -> None:
    automaton = StringContainAutomaton(tuple(case["pattern"]))
    status = case["force_status"] or 0
    assert (status, automaton.is_finished(status)) == (case["initial"]["status"], case["initial"]["finished"])
    statuses = []
    for token in case["inputs"]:
        status = automaton.step(status, token)
        statuses.append(status)
    assert statuses == case["expect_status"]
    assert [automaton.is_finished(status) for status in statuses] == case["expect_finished"]


@given(st.lists(st.integers(0, 2), max_size=6), tokens)
def test_status_is_the_longest_matching_prefix(pattern: list[int], stream: list[int]) -> None:
    automaton, status = StringContainAutomaton(tuple(pattern)), 0
    for length in range(len(stream) + 1):
        so_far = stream[:length]
        if any(so_far[start : start + len(pattern)] == pattern for start in range(length + 1)):
            assert automaton.is_finished(status)
        else:
            assert status == max(k for k in range(len(pattern)) if k <= length and so_far[length - k :] == pattern[:k])
            assert automaton.next_token(status) == pattern[status]
        status = automaton.step(status, stream[length]) if length < len(stream) else status


def test_equality_by_pattern() -> None:
    assert StringContainAutomaton((1, 2)) == StringContainAutomaton((1, 2)) != StringContainAutomaton((1, 3))
    assert hash(StringContainAutomaton((1, 2))) == hash(StringContainAutomaton((1, 2)))
