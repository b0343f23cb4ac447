"""Some rows of a matrix, without copies where there need be none."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`matrix[rows]`, without a copy if that is all of it. `rows`, int64 [n], is ascending without duplicates."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def row_parts(count: int, matrix: torch.Tensor, size: int) -> Iterator[slice]:
    """`count` rows, a few at a time on a CPU: temporaries of a whole batch would not fit into its caches.

    Args:
        matrix: [any, vocab]: what the rows are of.
        size: how many of its elements are worked on at a time.
    """
    rows = max(1, size // matrix.shape[-1]) if matrix.device.type == "cpu" else max(1, count)
    return (slice(start, start + rows) for start in range(0, count, rows))
