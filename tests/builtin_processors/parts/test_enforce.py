from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logits_processor_zoo.utils import enforce_tokens

from logitship.builtin_processors.parts import enforce as module
from logitship.builtin_processors.parts.enforce import argmax_is_among, enforce
from tests.helpers.zoo import RECORDING

INF = math.inf

# Name of a recorded case to the reason.
LEFT_OUT = {
    "forced_minus_inf_gives_nan": "QUIRK: forbidden tokens stay forbidden here, see test_forbidden_token_is_unchanged",
    "all_minus_inf": "QUIRK: the same",
}


def enforced(scores: list[float], tokens: list[int]) -> list[float]:
    logits = torch.tensor([scores])
    enforce(logits, torch.tensor([tokens]))
    return logits[0].tolist()


def test_recording() -> None:
    cases = {case["name"]: case for case in RECORDING["utils"] if case["function"] == "enforce_tokens"}
    assert set(LEFT_OUT) < set(cases)
    assert len(cases) == 10
    for name in set(cases) - set(LEFT_OUT):
        case = cases[name]
        got = enforced([float(score) for score in case["scores_in"]], case["tokens"])
        assert got == pytest.approx([float(score) for score in case["expect"]], rel=1e-6), name


def test_forbidden_token_is_unchanged() -> None:
    assert enforced([1, -INF, 0, 3], [1]) == [1, -INF, 0, 3]
    assert enforced([-INF, -INF], [0]) == [-INF, -INF]
    assert enforced([1, -INF, 0, 3], [1, 2]) == [-INF, -INF, 3, -INF]
    assert enforced([1, -INF, 0, 3], [2, 1, 0]) == [4, -INF, 3, -INF]


SCORES = st.floats(-100, 100, width=32)
ROWS = st.integers(1, 6).flatmap(
    lambda vocab: st.lists(
        st.tuples(
            st.lists(SCORES, min_size=vocab, max_size=vocab),
            st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)


@given(ROWS)
def test_equals_the_original_row_by_row(rows: list[tuple[list[float], list[int], bool]]) -> None:
    scores, tokens, active = zip(*rows, strict=True)
    logits = torch.tensor(scores)
    expected = torch.stack(
        [
            enforce_tokens(row.clone(), list(each)) if on else row
            for row, each, on in zip(logits, tokens, active, strict=True)
        ]
    )
    for is_cpu in (True, False):
        got = logits.clone()
        if is_cpu:
            enforce(got, torch.tensor(tokens), torch.tensor(active))
        else:  # what runs on other devices
            module._enforce(got, torch.tensor(tokens), torch.tensor(active))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
        for row, on in enumerate(active):
            if not on:
                assert torch.equal(got[row], logits[row])


@given(ROWS)
def test_argmax_is_among(rows: list[tuple[list[float], list[int], bool]]) -> None:
    scores, tokens, none = zip(*rows, strict=True)
    logits = torch.tensor(scores).round()  # so that some are equal
    wanted = torch.tensor([[-1, -1, -1] if off else each for each, off in zip(tokens, none, strict=True)])
    got = argmax_is_among(logits, wanted)
    assert got.tolist() == [row.argmax().item() in each for row, each in zip(logits, wanted.tolist(), strict=True)]


def test_lowest_id_wins_ties() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0]])
    assert argmax_is_among(logits, torch.tensor([[1]])).tolist() == [True]
    assert argmax_is_among(logits, torch.tensor([[2]])).tolist() == [False]
    assert argmax_is_among(logits, torch.tensor([[2, 1]])).tolist() == [True]


def test_row_without_tokens_is_unchanged() -> None:
    logits = torch.full((1, 3), -INF)
    enforce(logits, torch.tensor([[1, 1]]), torch.tensor([True]))
    assert logits.tolist() == [[-INF] * 3]
