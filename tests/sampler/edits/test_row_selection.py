from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.edits.edit_combination import combine_edits
from logitship.sampler.edits.edit_operations import Edit
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.edits.merged_edits import apply_edits
from logitship.sampler.edits.row_selection import finite_tokens, is_row_wise, select_rows
from logitship.sampler.processors.early_calls import may_forbid_most
from tests.helpers.random_cases import examples

from .random_edits import VOCAB, logs, logs_by_row, one_by_one, same_but_nan

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def edited(edits: Sequence[Edit], logits: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    one_by_one(edits, result)
    return result


def some_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(2))


@pytest.mark.slow
@examples(400)
@given(st.data())
def test_selected_rows_get_their_edits(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 4))
    edits = data.draw(st.one_of(logs(num_rows), logs_by_row(num_rows))).edits
    if data.draw(st.booleans()):
        edits = combine_edits(edits, num_rows, VOCAB)  # as they are sent
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True))
    logits = some_logits(num_rows)
    if not is_row_wise(edits, VOCAB):
        return
    selected = logits[rows]
    apply_edits(selected, [(range(len(rows)), select_rows(edits, rows, num_rows, VOCAB))])
    assert same_but_nan(selected, edited(edits, logits)[rows])


@pytest.mark.slow
@examples(400)
@given(st.data())
def test_values_of_other_rows_are_recognized(data: st.DataObject) -> None:
    """If edits are row-wise, no row depends on another."""
    edits = data.draw(logs(3)).edits
    if not is_row_wise(edits, VOCAB):
        return
    logits = some_logits(3)
    others = logits * 2
    others[1] = logits[1]
    assert same_but_nan(edited(edits, logits)[1:2], edited(edits, others)[1:2])


def test_restore_in_another_row_is_not_row_wise() -> None:
    log = EditLog(2, VOCAB)
    register = log.save([3])
    log.restore([3], register, [])
    assert is_row_wise(log.edits, VOCAB)
    log.restore([VOCAB + 3], register, [])
    assert not is_row_wise(log.edits, VOCAB)


@pytest.mark.slow
@examples(400)
@given(st.data())
def test_finite_tokens_hold_for_all_logits(data: st.DataObject) -> None:
    edits = combine_edits(data.draw(logs(1)).edits, 1, VOCAB)
    found = finite_tokens(edits, VOCAB)
    if found is None:
        return
    finite, again = found
    logits = 40 * some_logits(1)
    logits[0, ::3] = -math.inf
    result = edited(edits, logits)[0]
    expected = torch.where(logits[0].isfinite(), torch.from_numpy(finite), torch.from_numpy(again))
    assert torch.equal(result.isfinite(), expected)
    assert torch.equal(result.isneginf(), ~expected)


def test_forced_token_after_adding_minus_infinity_to_a_row_is_noticed() -> None:
    log = EditLog(1, VOCAB)
    log.edit_rows([0], "+", -math.inf)
    log.put([3], 1.0)
    assert may_forbid_most(log.edits, VOCAB)


@examples(400)
@given(st.data())
def test_what_forbids_all_but_one_token_is_noticed(data: st.DataObject) -> None:
    edits = data.draw(logs(1)).edits
    found = finite_tokens(edits, VOCAB)
    # Edits that name each forbidden token are not: nobody writes them so.
    if found is not None and found[0].sum() == 1 and not all(type(edit).__name__ == "Put" for edit in edits):
        assert may_forbid_most(edits, VOCAB)


@pytest.mark.parametrize(("operator", "number"), [("*", 3.0), ("*", -3.0), ("/", 0.1), ("+", 1e30), ("-", -2e38)])
def test_edits_that_may_overflow_are_not_judged(operator: str, number: float) -> None:
    log = EditLog(1, VOCAB)
    log.edit_rows([0], operator, number)
    assert finite_tokens(log.edits, VOCAB) is None


@pytest.mark.parametrize(
    "steps",
    [[("*", 2.0)] * 130, [("/", 0.5)] * 130, [("+", 9e29)] + [("*", 2.0)] * 30, [("*", 2.0)] * 40 + [("+", 9e29)]],
)
def test_edits_are_judged_unless_they_overflow_together(steps: list[tuple[str, float]]) -> None:
    log = EditLog(20, VOCAB)
    for operator, number in steps:
        log.edit_rows([0], operator, number)
    assert not log.is_full
    found = finite_tokens(select_rows(log.edits, [0], 20, VOCAB), VOCAB)
    is_in_range = edited(log.edits, torch.full((20, VOCAB), 30.0))[0].isfinite().all()
    assert (found is not None) == is_in_range


def test_forced_token_in_one_of_two_rows() -> None:
    log = EditLog(2, VOCAB)
    log.fill([1], -math.inf)
    log.put([VOCAB + 5], 0.0)
    log.put([2], -math.inf)
    found = [finite_tokens(select_rows(log.edits, [row], 2, VOCAB), VOCAB) for row in range(2)]
    assert all(each is not None for each in found)
    finite = [each[0].nonzero()[0].tolist() for each in found if each is not None]
    assert finite == [[token for token in range(VOCAB) if token != 2], [5]]
    assert may_forbid_most(log.edits, VOCAB)
