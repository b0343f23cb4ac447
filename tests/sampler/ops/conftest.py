"""Reference implementation of top-k and top-p that sorts the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from logitship.sampler.ops.sample_tokens import UNIT_WEIGHT

KeepBySorting = Callable[[torch.Tensor, torch.Tensor, int, float], dict[int, int]]
SampleBySorting = Callable[[torch.Tensor, torch.Tensor, int, float, float], int]


def _keep_by_sorting(logits: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float) -> dict[int, int]:
    values, amounts = logits.tolist(), weights.tolist()
    ranking = sorted(range(len(values)), key=lambda token: (-values[token], token))
    total = UNIT_WEIGHT
    if 0 < top_k < len(values):
        ranking = [token for token in ranking if values[token] >= values[ranking[top_k - 1]]]
        total = sum(amounts[token] for token in ranking)
    # Rounded once, as a float64 product: a border between two tokens may be that close.
    needed = math.ceil(Fraction(float(total) * top_p)) if top_p < 1 else math.inf
    kept: dict[int, int] = {}
    mass = 0
    for token in ranking:
        kept[token] = amounts[token]
        mass += amounts[token]
        if mass >= max(needed, 1):
            break
    return kept


@pytest.fixture(scope="session")
def keep_by_sorting() -> KeepBySorting:
    """(logits, integer weights, top_k, top_p) → kept tokens in ranking order, with their weights."""
    return _keep_by_sorting


@pytest.fixture(scope="session")
def sample_by_sorting() -> SampleBySorting:
    """(…, number in [0, 1)) → token at which the kept tokens' cumulative share exceeds the number."""

    def sample(logits: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float, number: float) -> int:
        kept = _keep_by_sorting(logits, weights, top_k, top_p)
        target = int(number * sum(kept.values()))
        reached = 0
        for token, weight in kept.items():
            reached += weight
            if reached > target:
                return token
        raise AssertionError("the numbers are below 1")

    return sample
