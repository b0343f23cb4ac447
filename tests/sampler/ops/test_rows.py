from __future__ import annotations

import math

import pytest
import torch

from logitship.sampler.ops.rows import BadWords, forbidden_tokens, greedy_sample, mask_forbidden, mask_tokens

CPU = torch.device("cpu")


def masked(logits: torch.Tensor) -> list[list[int]]:
    return [[token for token, value in enumerate(row) if value == -math.inf] for row in logits.tolist()]


def test_allowed_tokens() -> None:
    logits = torch.zeros(3, 5)
    mask_forbidden(logits, {1: forbidden_tokens({4, 0}, 5, CPU)})
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
    assert sorted(BadWords(bad_words).endings(output)) == sorted(endings)


def test_mask_tokens() -> None:
    logits = torch.zeros(3, 4)
    mask_tokens(logits, [0, 2, 2], [3, 0, 1])
    assert masked(logits) == [[3], [], [0, 1]]


def test_mask_tokens_without_tokens() -> None:
    logits = torch.zeros(2, 2)
    mask_tokens(logits, [], [])
    assert masked(logits) == [[], []]


def test_greedy_sample_takes_lowest_id_of_tie() -> None:
    logits = torch.randint(5, (50, 997)).float()
    assert greedy_sample(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
