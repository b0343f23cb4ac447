from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.random_cases import examples

from .promised import Outcome, assert_same, eager, promised
from .promised_programs import NUM_ROWS, VOCAB_SIZE, function_of, programs


def logits_of(seed: int) -> torch.Tensor:
    """Return logits with NaN, -inf and both zeros."""
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[0, 3], logits[2, 1] = -torch.inf, torch.nan
    logits[1, 2], logits[2, 6] = -0.0, 0.0
    return logits


def outcome_of_promised(statements: list[str], logits: torch.Tensor, *, read_first: bool = False) -> Outcome:
    """Run a program on promised and on real logits, which must come to the same, with the same exceptions."""
    real, other = function_of(statements), function_of(statements)
    expected = eager(real, logits)
    found = promised(other, logits, read_first=read_first)
    assert other.raised == real.raised
    assert_same(found, expected)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch warns once, so in only one of two calls
@examples(400)
@given(programs(), st.integers(0, 50))
def test_random_programs(statements: list[str], seed: int) -> None:
    outcome_of_promised(statements, logits_of(seed))


@pytest.mark.filterwarnings("ignore")
@examples(100)
@given(programs(), st.integers(0, 50))
def test_random_programs_after_a_read(statements: list[str], seed: int) -> None:
    outcome_of_promised(statements, logits_of(seed), read_first=True)


@pytest.mark.parametrize(
    "statement",
    [
        "l[0, ids] = l[1, ids]; l[1] = 0; l[2, ids] = l[1, ids]",  # saved after the first was restored
        "l += dense",
        "l += sparse",
        "l -= column",
        "l /= torch.full((R, V), 2.0)",
        "l[:] = vec",
        "l = l + torch.full((R, V), -inf)",
        "l[:, vec > 1.5] += 2",
        "l[:, [3, 3]] *= 2",
        "l[0, [ids[0], ids[1]]] -= 1",
        "l[0, []] = -inf; l[:, []] += 1",
        "l[[], []] -= torch.tensor([])",
        "l = torch.where(masks, l, -inf)",
        "c = l.clone(); c[0, 1] = 1; l[:] = c",
    ],
)
def test_recorded_without_a_read(statement: str) -> None:
    found = outcome_of_promised([statement], logits_of(0))
    assert not found.was_read
