from __future__ import annotations

import math

import pytest
import torch

from logitship.builtin_processors.min_p import MinPLogitsProcessor
from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate
from logitship.sampler.sampling_params import SamplingParams


def apply(logits: torch.Tensor, *min_p: float) -> torch.Tensor:
    processor = MinPLogitsProcessor(None, torch.device("cpu"), False)
    added: list[AddedRequest] = [(row, SamplingParams(min_p=value), [], []) for row, value in enumerate(min_p)]
    processor.update_state(BatchUpdate(len(added), [], added, []))
    return processor.apply(logits.clone())


@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4])
def test_against_the_definition(scale: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 500) * scale
    min_p = [0.0, 0.01, 0.4, 0.999]
    got = apply(logits, *min_p)
    probabilities = logits.double().softmax(-1)
    kept = probabilities >= probabilities.amax(-1, keepdim=True) * torch.tensor(min_p, dtype=torch.float64)[:, None]
    assert torch.equal(got, logits.masked_fill(~kept, -math.inf))


def test_min_p_of_one_keeps_ties() -> None:
    assert apply(torch.tensor([[1.0, 2.0, 2.0, -math.inf]]), 1.0).tolist() == [[-math.inf, 2.0, 2.0, -math.inf]]


def test_most_likely_token_is_kept() -> None:
    assert MinPLogitsProcessor(None, torch.device("cpu"), False).is_argmax_invariant()
