from __future__ import annotations

import pytest
import torch

from logitship.sampler.ops.candidates import top_candidates


def in_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 65, 1000, 1009, 5000])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 512])
@pytest.mark.parametrize("distinct", [2, 40, 10**6])
def test_against_sorting(vocab_size: int, width: int, distinct: int) -> None:
    torch.manual_seed(vocab_size * width)
    rows = torch.randint(distinct, (4, vocab_size)).float() - distinct / 2
    rows[0] = 0.0
    rows[1, vocab_size // 2 :] = float("-inf")
    values, token_ids = top_candidates(rows, width)
    assert values.shape == token_ids.shape == (4, min(width, vocab_size))
    for row, row_values, row_ids in zip(rows, values, token_ids, strict=True):
        expected = in_order(row)[:width]
        assert row_values.tolist() == row[expected].tolist()
        assert row[row_ids].tolist() == row_values.tolist()
        assert len(set(row_ids.tolist())) == len(row_ids)
        # Complete and in order above the last value; with the whole vocabulary, altogether.
        certain = len(expected) if width >= vocab_size else int((row_values > row_values[-1]).sum())
        assert row_ids[:certain].tolist() == expected[:certain]


def test_rows_of_a_wider_matrix() -> None:
    """A slice whose rows are not adjacent in memory."""
    matrix = torch.randn(6, 3000)[::2, :2000]
    values, token_ids = top_candidates(matrix, 64)
    for row, row_values, row_ids in zip(matrix, values, token_ids, strict=True):
        assert row_ids.tolist() == in_order(row)[:64]
        assert torch.equal(row[row_ids], row_values)
