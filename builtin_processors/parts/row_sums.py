"""Sums over the vocabulary that are the same in any batch."""

from __future__ import annotations

import torch

_BLOCK = 256


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, float64 [rows, 1].

    Sums blocks of tokens first. A kernel that sums whole rows splits the only row of a batch among threads, and so
    rounds it differently from the same row among others.

    Args:
        values: float32 [rows, vocab].
    """
    rows, columns = values.shape
    in_blocks = columns - columns % _BLOCK
    sums = values[:, :in_blocks].view(rows, in_blocks // _BLOCK, _BLOCK).sum(dim=-1)
    if in_blocks < columns:
        sums = torch.cat([sums, values[:, in_blocks:].sum(dim=-1, keepdim=True)], dim=-1)
    return sums.to(torch.float64).sum(dim=-1, keepdim=True)
