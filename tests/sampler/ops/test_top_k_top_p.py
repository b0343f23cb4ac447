from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from logitship.sampler.ops.candidates import top_candidates
from logitship.sampler.ops.top_k_top_p import UNIT_WEIGHT, integer_weights, keep_candidates, kept_tokens


def kept_by_sorting(logits: list[float], weights: list[int], top_k: int, top_p: float) -> set[int]:
    """Slow and plain: the definition in the module's text, in exact fractions."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    total = UNIT_WEIGHT
    if 0 < top_k < len(logits):
        order = [token for token in order if logits[token] >= logits[order[top_k - 1]]]
        total = sum(weights[token] for token in order)
    if top_p == 1:
        return set(order)
    kept, mass, needed = set(), 0, Fraction(top_p) * total
    for token in order:
        kept.add(token)
        mass += weights[token]
        if mass >= needed:
            break
    return kept


def distributions(vocab_size: int) -> torch.Tensor:
    """Float32 rows: peaked, ordinary, flat, tied in groups, one survivor, half masked, extreme."""
    rows = torch.randn(8, vocab_size)
    rows[0] *= 20
    rows[2] *= 0.01
    rows[3] = torch.randint(3, (vocab_size,)).float()
    rows[4, 1:] = float("-inf")
    rows[5, ::2] = float("-inf")
    rows[6] *= 1e4
    rows[7] = 1.0
    return rows


@pytest.mark.parametrize("vocab_size", [2, 5, 63, 1500])
@pytest.mark.parametrize("seed", range(4))
def test_kept_tokens_against_sorting(vocab_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = distributions(vocab_size)
    weights = integer_weights(logits.softmax(-1))
    for top_p in (1e-10, 0.013, 0.4321, 0.9123, 0.99987, 1.0):
        top_k = torch.tensor([0, 1, 2, 3, 7, 50, vocab_size, vocab_size + 3])[torch.randperm(8)]
        for row in range(8):
            kept = kept_tokens(logits[row], weights[row], int(top_k[row]), top_p)
            expected = kept_by_sorting(logits[row].tolist(), weights[row].tolist(), int(top_k[row]), top_p)
            got = set(kept.nonzero().squeeze(-1).tolist())
            # A token that weighs nothing is never drawn, kept or not.
            assert {t for t in got if weights[row, t] > 0} == {t for t in expected if weights[row, t] > 0}


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("seed", range(4))
def test_candidates_agree_with_the_whole_vocabulary(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    vocab_size = 2000
    logits = distributions(vocab_size)
    weights = integer_weights(logits.softmax(-1))
    for top_p in (1e-10, 0.013, 0.4321, 0.9123, 0.99987, 1.0):
        top_k = torch.tensor([0, 1, 2, 3, 7, 30, 50, 63])[torch.randperm(8)]
        p = torch.full((8,), top_p, dtype=torch.float64)
        values, token_ids = top_candidates(logits, width)
        kept = keep_candidates(values, weights.gather(-1, token_ids), top_k, p)
        for row in range(8):
            if kept.decided[row]:
                whole = kept_tokens(logits[row], weights[row], int(top_k[row]), top_p)
                assert int(kept.kept_weight[row]) == int(weights[row][whole].sum())
                within = kept.cumulative_weights[row] <= kept.kept_weight[row]
                heavy = weights[row, token_ids[row]] > 0
                survivor = torch.diff(kept.cumulative_weights[row], prepend=torch.tensor([0])) > 0
                tokens = set(token_ids[row][within & heavy & survivor].tolist())
                assert tokens == set((whole & (weights[row] > 0)).nonzero().squeeze(-1).tolist())


def test_what_is_decided_by_few_candidates() -> None:
    logits = torch.full((6, 1000), -2.0)
    logits[0, 5] = 50.0  # one certain token
    logits[1] = 1.0  # everything tied
    logits[2, :10] = 9.0  # top-k within, ties complete
    logits[3, :100] = 9.0  # the tie of the k-th token reaches beyond the candidates
    logits[4, 1:] = float("-inf")  # fewer tokens left than k
    logits[5] = torch.linspace(3, -3, 1000)  # flat: top-p needs more
    weights = integer_weights(logits.softmax(-1))
    values, token_ids = top_candidates(logits, 64)
    kept = keep_candidates(
        values,
        weights.gather(-1, token_ids),
        torch.tensor([0, 0, 4, 4, 20, 0]),
        torch.tensor([0.9, 0.9, 1.0, 1.0, 1.0, 0.9], dtype=torch.float64),
    )
    assert kept.decided.tolist() == [True, False, True, False, True, False]


def tokens_kept(logits: list[float], top_k: int, top_p: float) -> list[int]:
    row = torch.tensor(logits)
    return kept_tokens(row, integer_weights(row.softmax(-1)), top_k, top_p).nonzero().squeeze(-1).tolist()


def test_top_k_keeps_all_of_a_tie() -> None:
    assert tokens_kept([1.0, 3.0, 2.0, 2.0, 0.0], 2, 1.0) == [1, 2, 3]


def test_top_p_takes_the_lower_ids_of_a_tie() -> None:
    assert tokens_kept([0.0, 0.0, 0.0, 0.0], 0, 0.5) == [0, 1]
    assert tokens_kept([0.0, 0.0, 0.0, 0.0], 0, 0.51) == [0, 1, 2]


def test_top_p_counts_from_what_top_k_left() -> None:
    # Probabilities 8, 4, 2, 1, 1 of 16; after top-k 2 they are 8, 4 of 12.
    logits = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).log().tolist()
    assert tokens_kept(logits, 2, 0.66) == [0]
    assert tokens_kept(logits, 2, 0.67) == [0, 1]
    assert tokens_kept(logits, 0, 0.67) == [0, 1]
    assert tokens_kept(logits, 0, 0.76) == [0, 1, 2]


def test_negative_zero_ties_with_zero() -> None:
    assert tokens_kept([-0.0, 0.0, -1.0], 1, 1.0) == [0, 1]
    assert tokens_kept([0.0, -0.0, -9.0], 0, 0.4) == [0]


def test_integer_weights_are_exact() -> None:
    probabilities = torch.rand(1000)
    weights = integer_weights(probabilities)
    assert [w / UNIT_WEIGHT for w in weights.tolist()] == probabilities.tolist()
    assert integer_weights(torch.tensor([0.0, 1.0, 2.0**-60, 2.0**-61])).tolist() == [0, UNIT_WEIGHT, 1, 0]
