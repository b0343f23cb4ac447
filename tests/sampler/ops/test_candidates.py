from __future__ import annotations

import pytest
import torch

from logitship.sampler.ops.candidates import row_candidates, top_candidates


def in_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 65, 1000, 1009, 5000])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 512])
@pytest.mark.parametrize("distinct", [2, 40, 10**6])
def test_top_candidates_match_sorting(vocab_size: int, width: int, distinct: int) -> None:
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
        # Complete and in order above the last value; with the whole vocabulary, entirely.
        certain = len(expected) if width >= vocab_size else int((row_values > row_values[-1]).sum())
        assert row_ids[:certain].tolist() == expected[:certain]


def test_rows_of_a_wider_matrix() -> None:
    """The rows of a slice are not contiguous in memory."""
    matrix = torch.randn(6, 3000)[::2, :2000]
    values, token_ids = top_candidates(matrix, 64)
    for row, row_values, row_ids in zip(matrix, values, token_ids, strict=True):
        assert row_ids.tolist() == in_order(row)[:64]
        assert torch.equal(row[row_ids], row_values)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 65, 1009, 5000])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 512])
@pytest.mark.parametrize("distinct", [40, 10**6])
def test_row_candidates_are_complete(vocab_size: int, width: int, distinct: int) -> None:
    torch.manual_seed(vocab_size * width)
    for kind in ("all finite", "half masked", "one left"):
        row = torch.randint(distinct, (vocab_size,)).float() - distinct / 2
        if kind == "half masked":
            row[vocab_size // 2 + 1 :] = float("-inf")
        elif kind == "one left":
            row[1:] = float("-inf")
        token_ids, all_finite = row_candidates(row.numpy(), width)
        expected = [token for token in in_order(row) if not row[token].isneginf()]
        assert token_ids.tolist() == expected[: len(token_ids)]
        if all_finite:
            assert len(token_ids) == len(expected)
        else:
            if 0 < len(token_ids) < len(expected):
                assert row[expected[len(token_ids)]] < row[expected[len(token_ids) - 1]]
            too_many = sum(row[token] >= row[expected[width - 1]] for token in expected) > 8 * width
            assert len(token_ids) >= width or too_many


def test_large_tie_gives_no_row_candidates() -> None:
    row = torch.zeros(600)
    row[[7, 300]] = 1.0
    assert row_candidates(row.numpy(), 64)[0].tolist() == [7, 300]
    assert row_candidates(row.numpy(), 75)[0].tolist() == [7, 300, *range(7), *range(8, 300), *range(301, 600)]
