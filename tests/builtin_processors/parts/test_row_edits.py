from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from logitship.builtin_processors.parts.row_edits import forbid_tokens, force_tokens, keep_only, on_device


def test_against_a_loop() -> None:
    generator = random.Random(0)
    for _ in range(100):
        kept = {
            row: sorted(generator.sample(range(9), k=generator.randrange(5)))
            for row in range(6)
            if generator.random() < 0.6
        }
        logits = torch.randn(6, 9)
        expected = logits.clone()
        for row, tokens in kept.items():
            for token in range(9):
                if token not in tokens:
                    expected[row, token] = -torch.inf
        keep_only(logits, {row: np.array(tokens, dtype=np.int64) for row, tokens in kept.items()})
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_kept_logits_are_unchanged(value: float) -> None:
    logits = torch.tensor([[value, 1.0, 2.0]])
    keep_only(logits, {0: np.array([0, 2])})
    torch.testing.assert_close(logits, torch.tensor([[value, -torch.inf, 2.0]]), rtol=0, atol=0, equal_nan=True)


def test_force_tokens() -> None:
    logits = torch.randn(4, 5)
    expected = logits.clone()
    for row, token in ((1, 3), (2, 0)):
        expected[row] = -torch.inf
        expected[row, token] = 1.0
    force_tokens(logits, {1: 3, 2: 0}, logit=1.0)
    assert torch.equal(logits, expected)
    force_tokens(logits, {})
    assert torch.equal(logits, expected)


def test_forbid_tokens() -> None:
    logits = torch.zeros(3, 4)
    forbid_tokens(logits, on_device([0, 2, 2], [1, 0, 3], logits.device))
    assert logits.isinf().nonzero().tolist() == [[0, 1], [2, 0], [2, 3]]
