"""Operands of recorded edits: an author's numbers and tensors, where their conversion to float32 is unambiguous.

None stands for all others: such a call is left to PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.edits.edit_operations import FEW, Floats, Operand, Positions
from logitship.sampler.edits.logit_edits import EditLog

_MAX_FLOAT = float(np.finfo(np.float32).max)
_INFINITIES = (math.inf, -math.inf)
_EXACT_INT = 1 << 53
_FEW = 8
"""A dense operand is recorded as a number and exceptions from it if at most one in this many elements is one."""
_SAMPLE = 32
"""Approximate number of elements in the sample that is examined before all elements are."""


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
    """Return a number whose conversion to float32 is unambiguous; None for anything else.

    Args:
        value: the number, or a tensor with one element.
        max_dims: most dimensions of such a tensor.
    """
    kind = type(value)
    if kind is float:
        number = value
    elif kind is np.float64:
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
    # No NaN: one with a payload would lose it.
    return -_MAX_FLOAT <= number <= _MAX_FLOAT or number in _INFINITIES


def operand_of(value: Any, shape: tuple[int, ...]) -> Operand | None:
    """Return a number, or a copy, float32 [elements of `shape`], if this can be broadcast to that shape."""
    number = scalar_of(value)
    if number is not None:
        return number
    if not _can_broadcast(value, shape):
        return None
    return (value if value.shape == shape else value.expand(shape)).numpy().flatten()  # type: ignore[no-any-return]


def constant_of(value: Any, shape: tuple[int, ...]) -> float | None:
    """Return a number, or that of a tensor with the same number everywhere that can be broadcast to the shape."""
    number = scalar_of(value)
    if number is not None or not _can_broadcast(value, shape) or value.numel() == 0:
        return number
    found = _Background.of(value.numpy())
    return None if found is None or len(found.places) else found.number


def _can_broadcast(value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether this is float32 that can be broadcast to a shape."""
    if not is_plain(value, torch.float32) or value.ndim > len(shape):
        return False
    if value.shape in (shape, shape[-1:]):
        return True
    return all(size in (1, wanted) for size, wanted in zip(reversed(value.shape), reversed(shape), strict=False))


class DenseOperand:
    """A tensor that is an operand of whole rows.

    Args:
        values: float32 [rows or 1, vocab or 1].
        rows: the rows.
        vocab_size: number of columns.
    """

    def __init__(self, values: Floats, rows: Sequence[int], vocab_size: int) -> None:
        self._values = values
        self._rows = rows
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, value: Any, rows: Sequence[int], shape: tuple[int, ...]) -> DenseOperand | None:
        """Return the operand if this can be broadcast to whole rows, which have that shape."""
        if not rows or not _can_broadcast(value, shape) or value.numel() == 0:
            return None
        values: Floats = value.numpy()
        if values.ndim < 2:
            values = values.reshape(1, -1)
        is_column = values.shape[1] < shape[-1]
        if is_column and not all(map(_is_certain, values[:, 0].tolist())):
            return None
        return cls(values, rows, shape[-1])

    def put(self, log: EditLog) -> None:
        """Record its assignment to the rows."""
        exceptions = self._exceptions()
        if exceptions is not None:
            background, positions, values = exceptions
            log.fill(self._rows, background)
            log.put(positions, values)
            return
        for rows, operand in self._parts():
            if isinstance(operand, np.ndarray):
                log.put_rows(rows, operand)
            else:
                log.fill(rows, operand)

    def calculate(self, log: EditLog, operator: str) -> None:
        """Record an operator on the rows."""
        exceptions = self._exceptions()
        if exceptions is not None:
            background, positions, values = exceptions
            steps = ((operator, values),)
            if _changes_nothing(operator, background):
                log.edit_positions(positions, steps)
            elif operator == "+" and background == 0.0 and _has_no_zero(values):
                # Adding 0.0 turns -0.0 into 0.0, and both have the same sum with any other number.
                log.edit_rows(self._rows, operator, background)
                log.edit_positions(positions, steps)
            else:
                register = log.save(positions)
                log.edit_rows(self._rows, operator, background)
                log.restore(positions, register, steps)
            return
        for rows, operand in self._parts():
            log.edit_rows(rows, operator, operand)

    def _exceptions(self) -> tuple[float, Positions, Operand] | None:
        """Return the number of nearly all elements, the positions of all others, and their values."""
        if self._values.shape[1] < self._vocab_size:
            return None
        found = _Background.of(self._values)
        if found is None:
            return None
        places, values = found.places, found.values
        if len(self._values) > 1:
            own_rows, columns = np.divmod(places, self._vocab_size)
            positions = np.array(self._rows, np.int64)[own_rows] * self._vocab_size + columns
        elif len(self._rows) == 1:
            positions = places + self._rows[0] * self._vocab_size
        elif len(places) * len(self._rows) * _FEW > self._vocab_size:
            return None
        else:
            positions = (np.array(self._rows, np.int64)[:, None] * self._vocab_size + places).reshape(-1)
            values = np.tile(values, len(self._rows))
        number = _only_number(values)
        return found.number, positions.astype(np.uint32), values if number is None else number

    def _parts(self) -> list[tuple[Sequence[int], Operand]]:
        """Return rows and their operands."""
        is_column = self._values.shape[1] < self._vocab_size
        parts: list[Operand] = self._values[:, 0].tolist() if is_column else list(self._values)
        if len(parts) == 1:
            return [(self._rows, parts[0])]
        return [((row,), part) for row, part in zip(self._rows, parts, strict=True)]


def _changes_nothing(operator: str, number: float) -> bool:
    """Return whether an operator with this operand keeps all bits."""
    if operator in ("*", "/"):
        return number == 1.0
    # -0.0 + 0.0 is 0.0.
    return operator in ("+", "-") and number == 0.0 and math.copysign(1.0, number) == (-1.0 if operator == "+" else 1.0)


def _has_no_zero(values: Operand) -> bool:
    return bool(values.all()) if isinstance(values, np.ndarray) else values != 0.0


def _only_number(values: Floats) -> float | None:
    """Return the number that float32 [n] consists of; None if there are others, or it has no elements."""
    bits = values.view(np.int32)
    is_same = len(set(bits.tolist())) == 1 if len(bits) <= FEW else bool((bits == bits[0]).all())
    number = float(values[0]) if is_same else math.nan
    return number if _is_certain(number) else None


class _Background(NamedTuple):
    """The number of nearly all elements of a tensor, and the places and values of the others."""

    number: float
    places: npt.NDArray[np.intp]
    values: Floats

    @classmethod
    def of(cls, values: Floats) -> _Background | None:
        """Return the background of float32 values, of any shape; None if there is none."""
        flat = values.reshape(-1)
        bits = flat.view(np.int32)
        sample = bits[:: len(bits) // _SAMPLE + 1].tolist()
        # Its number is that of two in three elements, if not by chance.
        first, middle, last = sample[0], sample[len(sample) // 2], sample[-1]
        likely = first if first in (middle, last) else middle
        number = float(np.int32(likely).view(np.float32))
        if not _is_certain(number) or sample.count(likely) * 3 < len(sample) * 2:
            return None
        (places,) = (bits != likely).nonzero()
        return cls(number, places, flat[places]) if len(places) * _FEW <= len(bits) else None
