"""Work on some rows of a matrix: hard masks, the largest logit, and no needless copies, allocations or threads.

A mask gives forbidden tokens a logit of -inf.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def forbidden_tokens(allowed_token_ids: Collection[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a mask, bool [vocab], True at every token outside `allowed_token_ids`."""
    forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
    # NumPy reads a whole vocabulary in milliseconds, `torch.tensor` in tens of them.
    allowed = np.fromiter(allowed_token_ids, dtype=np.int64, count=len(allowed_token_ids))
    forbidden[torch.from_numpy(allowed).to(device)] = False
    return forbidden


def mask_forbidden(logits: torch.Tensor, forbidden: Mapping[int, torch.Tensor]) -> None:
    """Set the forbidden tokens of some rows to -inf, in place.

    Args:
        logits: float32 [rows, vocab].
        forbidden: row to bool [vocab], as returned by `forbidden_tokens`.
    """
    for row, mask in forbidden.items():
        logits[row].masked_fill_(mask, float("-inf"))


def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's most likely token, the lowest id of a tie: int64 [rows] from float32 [rows, vocab]."""
    if logits.device.type == "cpu":
        # Ten times faster than torch.argmax on a CPU, which does not use vector instructions there.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


class BadWords:
    """Words that must not appear, indexed by the token before their last one.

    Args:
        words: token sequences, each of at least one token.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._alone: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *beginning, ending in words:
            if beginning:
                self._after.setdefault(beginning[-1], []).append((beginning, ending))
            else:
                self._alone.append(ending)

    def endings(self, output_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a word now.

        A token completes a word of several tokens if the output ends with all but the last of them. The prompt does not
        count: a word that begins in the prompt may be completed.
        """
        if not output_token_ids:
            return self._alone
        return self._alone + [
            ending
            for beginning, ending in self._after.get(output_token_ids[-1], ())
            if list(output_token_ids[-len(beginning) :]) == beginning
        ]


def mask_tokens(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> None:
    """Set `logits[rows[i], token_ids[i]]` to -inf for every i, in place."""
    where = torch.tensor([rows, token_ids], dtype=torch.int64).to(logits.device)
    logits[where[0], where[1]] = float("-inf")


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
