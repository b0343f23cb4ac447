"""Edits of several rows of the logits with one write, without synchronizing with the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.device_tensor import TokenPositions, copies_to, token_positions


def on_device(rows: npt.ArrayLike, columns: npt.ArrayLike, device: torch.device) -> TokenPositions:
    """Return rows, with a token id each, as an index into logits on `device`."""
    to_device = copies_to(device)
    return to_device(np.asarray(rows, dtype=np.int64)), to_device(np.asarray(columns, dtype=np.int64))


def forbid_tokens(logits: torch.Tensor, positions: TokenPositions) -> None:
    """Set the logits at `positions` to -inf, in place."""
    # Created on the device: a Python number would be copied there synchronously.
    logits[positions] = logits.new_full((), -torch.inf)


def force_tokens(logits: torch.Tensor, forced: Mapping[int, int], logit: float = 0.0) -> None:
    """Force one token in each of some rows, in place: set all other tokens to -inf.

    Args:
        logits: float32 [rows, vocab].
        forced: the token by row.
        logit: the token's new logit.
    """
    if forced:
        rows, columns = on_device(list(forced), list(forced.values()), logits.device)
        logits.index_fill_(0, rows, -torch.inf)
        logits[rows, columns] = logits.new_full((), logit)


_MANY = 1 / 16
"""Share of kept logits in a batch above which a mask of the whole batch is faster than a list of positions."""


def keep_only(logits: torch.Tensor, kept: Mapping[int, npt.NDArray[np.int64]]) -> None:
    """Set all logits of some rows to -inf except those of given tokens, in place, without synchronization.

    Args:
        logits: float32 [rows, vocab].
        kept: the tokens to keep by row, int64 [any], within the vocabulary.
    """
    if not kept:
        return
    to_device = copies_to(logits.device)
    if sum(map(len, kept.values())) > logits.numel() * _MANY:
        logits.masked_fill_(to_device(_all_but(kept, logits.shape)), -torch.inf)
        return
    positions = token_positions(kept, to_device)
    values = logits[positions]
    if len(kept) == len(logits):  # all rows: twice as fast
        logits.fill_(-torch.inf)
    else:
        logits.index_fill_(0, to_device(np.array(list(kept), dtype=np.int64)), -torch.inf)
    logits[positions] = values


def _all_but(kept: Mapping[int, npt.NDArray[np.int64]], shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return a mask of all cells of these rows that are not kept."""
    cells = np.zeros(shape, dtype=np.bool_)
    for row, tokens in kept.items():
        cells[row] = True
        cells[row, tokens] = False
    return cells
