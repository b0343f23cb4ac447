from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from logitship.sampler.ops.sample_tokens import integer_weights
from logitship.sampler.ops.top_k_top_p import kept_tokens
from tests.helpers.random_cases import random_seeds

KeepBySorting = Callable[[torch.Tensor, torch.Tensor, int, float], dict[int, int]]


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 2, 5, 63, 700])
@random_seeds(4)
def test_kept_tokens_match_sorting(vocab_size: int, seed: int, keep_by_sorting: KeepBySorting) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(6, vocab_size)
    rows[0] *= 20
    rows[1] = torch.randint(3, (vocab_size,)).float()
    rows[2, 1:] = -math.inf
    rows[3, 1::2] = -math.inf
    rows[4] = 1.0
    for logits in rows:
        weights = integer_weights(logits.softmax(-1))
        for top_p in (1e-10, 0.013, 0.4321, 0.9123, 0.99987, 1.0):
            for top_k in (-1, 0, 1, 2, 7, vocab_size, vocab_size + 3):
                expected = set(keep_by_sorting(logits, weights, top_k, top_p))
                kept = set(kept_tokens(logits, top_k, top_p).nonzero().flatten().tolist())
                # The reference also lists forbidden tokens, which have weight 0 and are never sampled.
                assert kept == {token for token in expected if logits[token] > -math.inf}
