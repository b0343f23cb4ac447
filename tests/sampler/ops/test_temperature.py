from __future__ import annotations

import pytest
import torch

from logitship.sampler.ops.temperature import apply_temperature


def scaled(logits: torch.Tensor, *temperatures: float) -> torch.Tensor:
    logits = logits.clone()
    apply_temperature(logits, logits.amax(-1, keepdim=True), torch.tensor(temperatures)[:, None])
    return logits


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.randn(3, 10)
    assert torch.equal(scaled(logits, 0.5, 1.0, 3.0), logits / torch.tensor([[0.5], [1.0], [3.0]]))


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, torch.finfo(torch.float32).tiny])
@pytest.mark.parametrize("peak", [0.0, 1.0, 1e4, 3e38, -1e4, -3e38])
def test_near_zero_approaches_the_argmax(peak: float, temperature: float) -> None:
    logits = torch.full((1, 10), -3.2e38)
    logits[0, 3] = peak
    logits[0, 4] = float("-inf")
    probabilities = scaled(logits, temperature).softmax(-1)
    assert probabilities[0, 3] == 1
    assert probabilities.sum() == 1


def test_overflow_affects_only_its_row() -> None:
    logits = torch.randn(2, 10)
    alone = scaled(logits[:1], 0.7)
    logits[1, 0] = 1e38
    assert torch.equal(scaled(logits, 0.7, 1e-5)[:1], alone)


def test_high_temperature_is_flat() -> None:
    logits = torch.tensor([[5.0, -5.0, float("-inf"), 0.0]])
    probabilities = scaled(logits, torch.finfo(torch.float32).max).softmax(-1)
    torch.testing.assert_close(probabilities, torch.tensor([[1 / 3, 1 / 3, 0.0, 1 / 3]]))
