"""Tensors that depend on the rows of a batch, but not on the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.device_tensor import copies_to

R = TypeVar("R")
C = TypeVar("C")


class RowConstants(Generic[R, C]):
    """Caches the result of `make` as long as the batch has the same rows.

    Args:
        make: computes the constants from the rows' objects and the device of the logits.
    """

    def __init__(self, make: Callable[[Sequence[R], torch.device], C]) -> None:
        self._make = make
        self._rows: list[R] = []
        self._device: torch.device | None = None
        self._made: C | None = None

    def of(self, rows: Sequence[R], device: torch.device) -> C:
        """Return the constants of these rows. Rows are equal if they are the same objects in the same order."""
        same = len(rows) == len(self._rows) and all(one is other for one, other in zip(rows, self._rows, strict=True))
        if self._made is None or not same or device != self._device:
            self._made = self._make(rows, device)
            self._rows, self._device = list(rows), device
        return self._made


def to_device(numbers: Iterable[Any], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    """Copy numbers, or lists of numbers of equal length, to the device of the logits, without synchronization."""
    return copies_to(device)(np.array(list(numbers), dtype=dtype))


def padded(token_lists: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return a tensor, int64 [rows, longest list]. Shorter lists are padded with their first token; none is empty."""
    cells = np.empty((len(token_lists), max(map(len, token_lists))), dtype=np.int64)
    for row, tokens in enumerate(token_lists):
        cells[row, : len(tokens)] = tokens
        cells[row, len(tokens) :] = tokens[0]
    return copies_to(device)(cells)
