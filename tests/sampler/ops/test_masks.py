from __future__ import annotations

import math

import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.ops.masks import AllowedTokensMask, BadWords, mask_tokens
from logitship.sampler.sampling_params import SamplingParams

CPU = torch.device("cpu")


def masked(logits: torch.Tensor) -> list[list[int]]:
    return [[token for token, value in enumerate(row) if value == -math.inf] for row in logits.tolist()]


def test_allowed_tokens() -> None:
    logits = torch.zeros(3, 5)
    mask = AllowedTokensMask(5, CPU)
    mask.update_state(BatchUpdate(2, [], [(1, SamplingParams(allowed_token_ids=[4, 0]), [], [])], []))
    mask.apply(logits, None)
    assert masked(logits) == [[], [1, 2, 3], []]


@pytest.mark.parametrize(
    ("bad_words", "output", "endings"),
    [
        ([(7,)], [], [7]),
        ([(1, 2)], [], []),
        ([(1, 2)], [1], [2]),
        ([(1, 2)], [2], []),
        ([(1, 2, 3)], [1], []),
        ([(1, 2, 3)], [2], []),
        ([(1, 2, 3)], [1, 2], [3]),
        ([(1, 2, 3)], [5, 1, 2], [3]),
        ([(1, 2, 3)], [1, 2, 5], []),
        ([(1, 1, 1)], [1, 1, 1], [1]),
        ([(1, 2), (5,), (9, 2), (3, 1, 4)], [3, 1], [2, 5, 4]),
    ],
)
def test_bad_words(bad_words: list[tuple[int, ...]], output: list[int], endings: list[int]) -> None:
    assert sorted(BadWords(bad_words, output).endings()) == sorted(endings)


def test_mask_tokens() -> None:
    logits = torch.zeros(3, 4)
    mask_tokens(logits, [0, 2, 2], [3, 0, 1])
    assert masked(logits) == [[3], [], [0, 1]]


def test_mask_tokens_without_tokens() -> None:
    logits = torch.zeros(2, 2)
    mask_tokens(logits, [], [])
    assert masked(logits) == [[], []]
