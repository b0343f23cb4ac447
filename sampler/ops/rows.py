"""Work on some rows of a matrix without needless copies, allocations and threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FEW = 2**18
"""Number of elements that one thread reads in tens of microseconds."""


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `matrix[rows]`, without a copy if that is all of it. `rows`, int64 [n], ascends without duplicates."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def row_parts(count: int, matrix: torch.Tensor, size: int) -> Iterator[slice]:
    """Split `count` rows into slices, small ones on a CPU: temporaries of a whole batch would not fit into its caches.

    Args:
        count: number of rows.
        matrix: [any, vocab]: the matrix of the rows.
        size: number of elements to process at a time.
    """
    rows = max(1, size // matrix.shape[-1]) if matrix.device.type == "cpu" else max(1, count)
    return (slice(start, start + rows) for start in range(0, count, rows))


@contextmanager
def one_thread_for_few(matrix: torch.Tensor) -> Iterator[None]:
    """Run operations on a small matrix in a single thread.

    Several threads would gain a few microseconds, and lose milliseconds whenever a thread finds its core busy.
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
    """A reusable buffer for matrices of the size of the logits.

    New memory costs a page fault per 4 KiB: for the log-probabilities of 32 rows of 49,152 tokens, that takes twice as
    long as computing them. On other devices PyTorch caches freed memory by itself.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def rows(self, start: int, count: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for some rows, to pass as `out`: float32 [count, columns]. Overwrites its old contents.

        Args:
            start: number of earlier rows of the same step, which keep their memory.
            count: number of rows.
            like: float32 [any, columns]: the operand, for its device and number of columns.

        Returns:
            None if a buffer gains nothing: `out=None` allocates new memory.
        """
        if like.device.type != "cpu":
            return None
        columns = like.shape[-1]
        if self._kept.numel() < (start + count) * columns:
            with torch.inference_mode(False):  # otherwise it could not be written to outside that mode
                self._kept = torch.empty((start + count) * columns)
        return self._kept[start * columns : (start + count) * columns].view(count, columns)
