from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.server.requests.beam_search import (
    Candidate,
    Hypotheses,
    rank_candidates,
    select,
)
from logitship.server.requests.messages import BeamSearch


def test_candidates_are_ranked_across_beams() -> None:
    most_likely = [[(5, -1.0), (6, -2.0), (7, -math.inf)], [(5, -0.5), (8, -1.5)]]
    assert rank_candidates([-1.0, -1.5], most_likely, 3) == [
        Candidate(0, 5, 0, -2.0),
        Candidate(1, 5, 0, -2.0),
        Candidate(0, 6, 1, -3.0),
    ]
    assert [(one.beam, one.token_id) for one in rank_candidates([-1.0, -1.5], most_likely, 99)][3:] == [(1, 8)]


def ranked(*tokens: int) -> list[Candidate]:
    return [Candidate(0, token, rank, -float(rank)) for rank, token in enumerate(tokens)]


def test_select_running_and_finished_candidates() -> None:
    checked = []

    def ends(candidate: Candidate) -> bool:
        checked.append(candidate.token_id)
        return candidate.token_id >= 100

    selection = select(ranked(100, 1, 101, 2, 3), 2, ends)
    assert [one.token_id for one in selection.finished] == [100]  # 101 is not among the first two
    assert [one.token_id for one in selection.running] == [1, 2]
    assert checked == [100, 1, 101, 2]  # 3 is not needed


@given(
    st.integers(1, 4),
    st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    st.lists(st.tuples(st.floats(-20, 0), st.integers(1, 9)), max_size=12),
)
def test_best_hypotheses_are_kept(width: int, penalty: float, finished: list[tuple[float, int]]) -> None:
    hypotheses: Hypotheses[int] = Hypotheses(BeamSearch(width, penalty))
    for number, (cumulative, length) in enumerate(finished):
        hypotheses.add(cumulative, length, number)
    expected = sorted(
        ((-cumulative / length**penalty, number) for number, (cumulative, length) in enumerate(finished))
    )[:width]
    assert [(-one.score, one.output) for one in hypotheses.best] == expected


def full_pool(search: BeamSearch) -> Hypotheses[str]:
    """Two hypotheses, of which the worse has the sum -8 over four tokens."""
    hypotheses: Hypotheses[str] = Hypotheses(search)
    hypotheses.add(-2.0, 4, "best")
    hypotheses.add(-8.0, 4, "worst")
    return hypotheses


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "running", "is_final"),
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -9.9, False),  # -9.9 / 5 is above -8 / 4
        (False, 1.0, -10.0, True),  # equal is not better
        (False, 0.0, -7.9, False),
        (False, 0.0, -8.1, True),
        ("never", 1.0, -19.9, False),  # could still reach ten tokens
        ("never", 1.0, -20.1, True),
        ("never", -1.0, -6.3, False),  # a longer output scores worse
        ("never", -1.0, -6.5, True),
    ],
)
def test_is_final_with_enough_hypotheses(
    early_stopping: bool, length_penalty: float, running: float, is_final: bool
) -> None:
    hypotheses = full_pool(BeamSearch(2, length_penalty, early_stopping))
    assert hypotheses.is_final([running - 1, running], length=5, max_length=10) == is_final


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_is_not_final_without_enough_hypotheses(early_stopping: bool) -> None:
    hypotheses = full_pool(BeamSearch(3, 1.0, early_stopping))
    assert not hypotheses.is_final([-1e6], length=5, max_length=10)
    assert hypotheses.is_final([], length=5, max_length=10)
