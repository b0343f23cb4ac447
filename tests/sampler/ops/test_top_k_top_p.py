from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from logitship.sampler.ops.candidates import row_candidates
from logitship.sampler.ops.sample_tokens import integer_weights
from logitship.sampler.ops.top_k_top_p import (
    CandidateSample,
    sample_from_all,
    sample_from_candidates,
    top_k_top_p_sample,
)
from tests.helpers.random_cases import random_seeds

SampleBySorting = Callable[[torch.Tensor, torch.Tensor, int, float, float], int]

NUMBERS = (0.0, 0.37, 0.81, 1 - 2.0**-53)


def distributions(vocab_size: int) -> torch.Tensor:
    """Float32 rows: peaked, ordinary, flat, tied in groups, one survivor, half masked, extreme, equal."""
    rows = torch.randn(8, vocab_size)
    rows[0] *= 20
    rows[2] *= 0.01
    rows[3] = torch.randint(3, (vocab_size,)).float()
    rows[4, 1:] = -math.inf
    rows[5, 1::2] = -math.inf
    rows[6] *= 1e4
    rows[7] = 1.0
    return rows


def sample_candidates(
    logits: torch.Tensor, width: int, top_k: int, top_p: float, number: float = 0.0
) -> tuple[CandidateSample, int | None]:
    """Sample from the candidates of a row; return the result and the token, None if undecided."""
    token_ids, all_finite = row_candidates(logits.numpy(), width)
    weights = integer_weights(logits.softmax(-1))[token_ids].tolist()
    complete = all_finite or weights[-1:] == [0]
    sampled = sample_from_candidates(logits[token_ids].tolist(), weights, complete, top_k, top_p, number)
    return sampled, None if sampled.position is None else int(token_ids[sampled.position])


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 63, 1500])
@random_seeds(4)
def test_sample_from_all_matches_sorting(vocab_size: int, seed: int, sample_by_sorting: SampleBySorting) -> None:
    torch.manual_seed(seed)
    logits = distributions(vocab_size)
    weights = integer_weights(logits.softmax(-1))
    for top_p in (1e-10, 0.013, 0.4321, 0.9123, 0.99987, 1.0):
        top_k = torch.tensor([0, 1, 2, 3, 7, 50, vocab_size, vocab_size + 3])[torch.randperm(8)].tolist()
        for row in range(8):
            number = NUMBERS[row % len(NUMBERS)]
            expected = sample_by_sorting(logits[row], weights[row], top_k[row], top_p, number)
            assert sample_from_all(logits[row], weights[row], top_k[row], top_p, number) == expected


LARGE = 3000
"""Number of tokens for which a bucket is not sorted but divided again."""


def hard_rows() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    narrow = torch.randn(LARGE) * 0.01
    masked, pushed_down = narrow.clone(), narrow.clone()
    masked[::3] = -math.inf
    pushed_down[::3] = -1e9
    return {
        "equal": torch.zeros(LARGE),
        "two levels": torch.randint(2, (LARGE,)).float() * 1e-3,
        "denormal": torch.randint(3, (LARGE,)).float() * 1.4e-45,
        "tiny": torch.rand(LARGE) * 1e-38,
        "huge": torch.randn(LARGE).clamp(-3, 3) * 1e38,
        "masked": masked,
        "pushed down": pushed_down,
        "over all magnitudes": -(2.0 ** torch.linspace(-140, 120, LARGE)),
        "a far tail": torch.cat([torch.zeros(600), -torch.rand(LARGE - 600) * 3e38]),
    }


@pytest.mark.parametrize("name", hard_rows())
def test_sample_from_all_with_large_buckets(name: str, sample_by_sorting: SampleBySorting) -> None:
    logits = hard_rows()[name]
    weights = integer_weights(logits.softmax(-1))
    settings = [(0, 0.5), (0, 1 - 1e-7), (600, 0.5), (2000, 1.0), (LARGE - 1, 0.9), (0, 1.0)]
    for top_k, top_p in settings:
        for number in NUMBERS:
            expected = sample_by_sorting(logits, weights, top_k, top_p, number)
            assert sample_from_all(logits, weights, top_k, top_p, number) == expected


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 512])
@random_seeds(4)
def test_candidates_agree_with_whole_vocabulary(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = distributions(2000)
    weights = integer_weights(logits.softmax(-1))
    decided = 0
    for top_p in (1e-10, 0.013, 0.4321, 0.9123, 0.99987, 1.0):
        top_k = torch.tensor([0, 1, 2, 3, 7, 30, 50, 63])[torch.randperm(8)].tolist()
        for number in NUMBERS:
            for row in range(8):
                _, token = sample_candidates(logits[row], width, top_k[row], top_p, number)
                if token is not None:
                    assert token == sample_from_all(logits[row], weights[row], top_k[row], top_p, number)
                    decided += 1
    assert decided > 60


def test_few_candidates_decide() -> None:
    logits = torch.full((6, 1000), -2.0)
    logits[0, 5] = 50.0  # one certain token
    logits[1] = 1.0  # everything tied
    logits[2, :10] = 9.0  # top-k within, ties complete
    logits[3, :100] = 9.0  # the tie of the k-th token exceeds k, and is complete
    logits[4, 1:] = -math.inf  # fewer tokens left than k
    logits[5] = torch.linspace(3, -3, 1000)  # flat: top-p needs more
    settings = [(0, 0.9), (0, 0.9), (4, 1.0), (4, 1.0), (20, 1.0), (0, 0.9)]
    sampled = [sample_candidates(row, 64, k, p)[0] for row, (k, p) in zip(logits, settings, strict=True)]
    assert [each.position is not None for each in sampled] == [True, False, True, True, True, False]


def test_minimum_candidates_needed() -> None:
    """0.9 of the mass of 1000 nearly equal tokens is 900 tokens. In a steep row, a few more may be enough."""
    nearly_equal, steep = torch.linspace(1e-3, 0, 1000), torch.linspace(60, 0, 1000)
    flat, _ = sample_candidates(nearly_equal, 64, 0, 0.9)
    assert flat.position is None
    assert flat.candidates_needed == pytest.approx(900, abs=1)
    short, _ = sample_candidates(steep, 64, 0, 0.99)
    assert short.position is None
    assert 64 < short.candidates_needed < 77
    wider, _ = sample_candidates(steep, 80, 0, 0.99)
    assert wider.position is not None


def kept(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """Return the tokens that some number samples."""
    row = torch.tensor(logits)
    weights = integer_weights(row.softmax(-1))
    return sorted({sample_from_all(row, weights, top_k, top_p, number / 1000) for number in range(1000)})


def test_top_k_keeps_whole_tie() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], 2, 1.0) == [1, 2, 3]


def test_top_p_keeps_lower_ids_of_tie() -> None:
    assert kept([0.0, 0.0, 0.0, 0.0], 0, 0.5) == [0, 1]
    assert kept([0.0, 0.0, 0.0, 0.0], 0, 0.51) == [0, 1, 2]


@pytest.mark.slow
def test_top_p_is_relative_to_top_k() -> None:
    # Probabilities 8, 4, 2, 1, 1 of 16; after top-k 2 they are 8, 4 of 12.
    logits = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).log().tolist()
    assert kept(logits, 2, 0.66) == [0]
    assert kept(logits, 2, 0.67) == [0, 1]
    assert kept(logits, 0, 0.67) == [0, 1]
    assert kept(logits, 0, 0.76) == [0, 1, 2]


def test_negative_zero_ties_with_zero() -> None:
    assert kept([-0.0, 0.0, -1.0], 1, 1.0) == [0, 1]
    assert kept([0.0, -0.0, -9.0], 0, 0.4) == [0]


def test_sampling_does_not_modify_inputs() -> None:
    logits = torch.randn(3, 2000) * 0.01
    probabilities = logits.softmax(-1)
    before = logits.clone(), probabilities.clone()
    top_k_top_p_sample(logits, probabilities, [0] * 3, [0.9] * 3, [0.9] * 3)
    assert torch.equal(logits, before[0])
    assert torch.equal(probabilities, before[1])
