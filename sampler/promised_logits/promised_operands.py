"""Operands of recorded edits: numbers and tensors of an author, as far as PyTorch uses them in one certain way.

Everything here returns None for what is not certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.edits.edit_operations import Operand
from logitship.sampler.edits.logit_edits import EditLog

_MAX_FLOAT = float(np.finfo(np.float32).max)
_EXACT_INT = 1 << 53
_FEW = 8
"""A dense operand is recorded as a number and exceptions from it if at most one in this many elements is one."""
_SAMPLE = 32
"""Number of elements, about, that are looked at before all are."""


def is_plain(value: Any, dtype: torch.dtype) -> bool:
    """Return whether this is an ordinary tensor of that type on the CPU."""
    return (
        type(value) is torch.Tensor
        and value.dtype is dtype
        and value.is_cpu
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_neg()  # NumPy has no such tensors
    )


def scalar_of(value: Any, max_dims: int = 0) -> float | None:
    """Return a number that PyTorch converts to float32 in one certain way.

    Args:
        value: the number, or a tensor with one element.
        max_dims: most dimensions of such a tensor.
    """
    kind = type(value)
    if kind is float or kind is np.float64:
        number = float(value)
    elif kind is int:
        if abs(value) > _EXACT_INT:
            return None
        number = float(value)
    elif kind is torch.Tensor and value.numel() == 1 and value.ndim <= max_dims and is_plain(value, torch.float32):
        number = value.item()
    else:
        return None
    return number if _is_certain(number) else None


def _is_certain(number: float) -> bool:
    if abs(number) > _MAX_FLOAT and number not in (float("inf"), float("-inf")):
        return False
    return number == number  # a NaN with a payload would lose it


def operand_of(value: Any, shape: tuple[int, ...]) -> Operand | None:
    """Return a number, or a copy, float32 [elements of `shape`], if this can be broadcast to that shape."""
    number = scalar_of(value)
    if number is not None:
        return number
    spread = _broadcast(value, shape)
    return None if spread is None else spread.numpy().flatten()


def constant_of(value: Any, shape: tuple[int, ...]) -> float | None:
    """Return a number, or that of a tensor with the same number everywhere that can be broadcast to the shape."""
    number = scalar_of(value)
    if number is not None or _broadcast(value, shape) is None or value.numel() == 0:
        return number
    found = _background(value)
    return None if found is None or len(found[1]) else found[0]


def _broadcast(value: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return float32 of that shape, without a copy."""
    if not is_plain(value, torch.float32) or value.ndim > len(shape):
        return None
    if value.shape == shape:
        return value  # type: ignore[no-any-return]
    for size, wanted in zip(reversed(value.shape), reversed(shape), strict=False):
        if size not in (1, wanted):
            return None
    return value.expand(shape)  # type: ignore[no-any-return]


class DenseOperand:
    """A tensor that is an operand of whole rows.

    Args:
        values: float32 [rows or 1, vocab or 1].
        rows: the rows.
        vocab_size: number of columns.
    """

    def __init__(self, values: torch.Tensor, rows: Sequence[int], vocab_size: int) -> None:
        self._values = values
        self._rows = rows
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, value: Any, rows: Sequence[int], shape: tuple[int, ...]) -> DenseOperand | None:
        """Return the operand if this can be broadcast to whole rows, which have that shape."""
        if not rows or _broadcast(value, shape) is None or value.numel() == 0:
            return None
        values = value if value.ndim == 2 else value[None] if value.ndim == 1 else value[None, None]
        operand = cls(values, rows, shape[-1])
        is_column = values.shape[1] < shape[-1]
        if is_column and any(scalar_of(number) is None for number in values[:, 0]):
            return None
        return operand

    def put(self, log: EditLog) -> None:
        """Record its assignment to the rows."""
        exceptions = self._exceptions()
        if exceptions is not None:
            background, positions, values = exceptions
            log.fill(self._rows, background)
            log.put(positions, values)
            return
        for rows, values in self._parts():
            if isinstance(values, float):
                log.fill(rows, values)
            else:
                log.put_rows(rows, torch.from_numpy(values))

    def calculate(self, log: EditLog, operator: str) -> None:
        """Record an operator on the rows."""
        exceptions = self._exceptions()
        if exceptions is not None:
            background, positions, values = exceptions
            register = log.save(positions)
            if not _changes_nothing(operator, background):
                log.edit_rows(self._rows, operator, background)
            log.restore(positions, register, [(operator, values)])
            return
        for rows, values in self._parts():
            log.edit_rows(rows, operator, values if isinstance(values, float) else torch.from_numpy(values))

    def _exceptions(self) -> tuple[float, npt.NDArray[np.int64], Operand] | None:
        """Return the number that is nearly everywhere, and the positions with other values, and these."""
        if self._values.shape[1] < self._vocab_size:
            return None
        found = _background(self._values)
        if found is None:
            return None
        background, places = found
        if len(self._values) == 1 < len(self._rows):
            if len(places) * len(self._rows) * _FEW > self._vocab_size:
                return None
            columns = places
            positions = (np.array(self._rows, np.int64)[:, None] * self._vocab_size + columns).reshape(-1)
        else:
            own_rows, columns = np.divmod(places, self._vocab_size)
            positions = np.array(self._rows, np.int64)[own_rows] * self._vocab_size + columns
        values = self._values.detach().reshape(-1).numpy()[places]
        if len(values) and (values.view(np.int32) == values.view(np.int32)[0]).all() and _is_certain(float(values[0])):
            return background, positions, float(values[0])
        return background, positions, np.tile(values, len(positions) // max(len(values), 1))

    def _parts(self) -> list[tuple[Sequence[int], Operand]]:
        """Return rows and their operands."""
        values = self._values.detach().numpy()
        if values.shape[1] < self._vocab_size:
            parts: list[Operand] = [float(number) for number in values[:, 0]]
        else:
            parts = list(values)
        if len(parts) == 1:
            return [(self._rows, parts[0])]
        return [((row,), part) for row, part in zip(self._rows, parts, strict=True)]


def _changes_nothing(operator: str, number: float) -> bool:
    """Return whether an operator with this operand keeps all bits."""
    if operator in ("*", "/"):
        return number == 1.0
    # -0.0 + 0.0 is 0.0.
    return operator in ("+", "-") and number == 0.0 and math.copysign(1.0, number) == (-1.0 if operator == "+" else 1.0)


def _background(values: torch.Tensor) -> tuple[float, npt.NDArray[np.int64]] | None:
    """Return the number of nearly all elements, and the places of the others; None if there is none."""
    bits = np.ascontiguousarray(values.detach().numpy()).reshape(-1).view(np.int32)
    # Its number is that of two in three elements, if not by chance.
    first, middle, last = bits[0], bits[len(bits) // 2], bits[-1]
    likely = first if first in (middle, last) else middle
    number = float(likely.view(np.float32))
    sample = bits[:: len(bits) // _SAMPLE + 1]
    if not _is_certain(number) or np.count_nonzero(sample != likely) * 3 > len(sample):
        return None
    differs = bits != likely
    if np.count_nonzero(differs) * _FEW > len(bits):
        return None
    return number, differs.nonzero()[0]
