"""Work on some rows of a matrix without needless copies, allocations or threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FEW = 2**18
"""Of so many numbers, one thread reads all in tens of microseconds."""


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


@contextmanager
def one_thread_for_few(matrix: torch.Tensor) -> Iterator[None]:
    """Operations on a small matrix are not divided among threads meanwhile.

    They would gain a few microseconds, and lose milliseconds wherever another thread finds its core busy.
    """
    threads = torch.get_num_threads()
    if matrix.device.type != "cpu" or matrix.numel() > _FEW or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Scratch:
    """Buffers for matrices of the size of the logits, kept from step to step.

    Memory that is new to a process costs a page fault for every 4 KiB of it: for the log-probabilities of 32 rows of
    49,152 tokens, that takes twice as long as to compute them. On other devices PyTorch keeps freed memory by itself.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def rows(self, start: int, count: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for some rows: float32 [count, columns], to pass as `out`. Its old contents are overwritten.

        Args:
            start: how many rows of the same step come before it, whose room stays theirs.
            like: float32 [any, columns]: where it will be computed.

        Returns:
            None where there is nothing to gain: `out=None` takes new memory.
        """
        if like.device.type != "cpu":
            return None
        columns = like.shape[-1]
        if self._kept.numel() < (start + count) * columns:
            with torch.inference_mode(False):  # else it could not be written to outside of that mode
                self._kept = torch.empty((start + count) * columns)
        return self._kept[start * columns : (start + count) * columns].view(count, columns)
