"""Operands of recorded edits: an author's numbers and tensors, where their conversion to float32 is unambiguous.

None stands for all others: such a call is left to PyTorch.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from logitship.sampler.edits.edit_operations import Floats, Operand, Positions
from logitship.sampler.edits.logit_edits import EditLog

_MAX_FLOAT = float(np.finfo(np.float32).max)
_EXACT_INT = 1 << 53
_FEW = 8
"""A tensor is recorded as a number and exceptions from it if at most one in this many elements is one."""
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


def scalar_of(value: Any) -> float | None:
    """Return a number whose conversion to float32 is unambiguous; None for anything else."""
    kind = type(value)
    if kind is float:
        number = value
    elif kind is int:
        if abs(value) > _EXACT_INT:
            return None
        number = float(value)
    elif is_plain(value, torch.float32) and value.ndim == 0:
        number = value.item()
    else:
        return None
    return number if _is_certain(number) else None


def _is_certain(number: float) -> bool:
    # No NaN: one with a payload would lose it.
    return -_MAX_FLOAT <= number <= _MAX_FLOAT or math.isinf(number)


def operand_of(value: Any, shape: tuple[int, ...]) -> Operand | None:
    """Return a number, or a copy, float32 [elements of `shape`], if this can be broadcast to that shape."""
    number = scalar_of(value)
    if number is not None:
        return number
    if not _can_broadcast(value, shape):
        return None
    return (value if value.shape == shape else value.expand(shape)).numpy().flatten()  # type: ignore[no-any-return]


def _can_broadcast(value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether this is float32 that can be broadcast to a shape."""
    return is_plain(value, torch.float32) and (
        value.shape == shape
        or (
            value.ndim <= len(shape)
            and all(size in (1, wanted) for size, wanted in zip(reversed(value.shape), reversed(shape), strict=False))
        )
    )


def calculate_rows(log: EditLog, rows: range, shape: tuple[int, ...], operator: str, operand: Any) -> bool:
    """Record an operator on whole rows. Return False if the operand is no number, and cannot be broadcast to them.

    Args:
        log: records it.
        rows: the rows.
        shape: their shape, [rows, vocab], or [vocab] for one row.
        operator: see `ARITHMETIC`.
        operand: the author's.
    """
    number = scalar_of(operand)
    if number is not None:
        log.edit_rows(rows, operator, number)
        return True
    if not rows or not _can_broadcast(operand, shape) or operand.ndim == 0 or operand.numel() == 0:
        return False
    values: Floats = np.ascontiguousarray(operand.numpy()).reshape(-1, operand.shape[-1])
    if values.shape[1] < shape[-1]:
        numbers = [*map(scalar_of, operand.reshape(-1))]
        if None in numbers:
            return False
        parts: list[Operand] = numbers  # type: ignore[assignment]  # none is None
    elif _calculate_exceptions(log, rows, shape[-1], operator, values):
        return True
    else:
        parts = [*values]
    for part_rows, part in [(rows, parts[0])] if len(parts) == 1 else zip(([row] for row in rows), parts, strict=True):
        log.edit_rows(part_rows, operator, part)
    return True


def _calculate_exceptions(log: EditLog, rows: range, vocab_size: int, operator: str, values: Floats) -> bool:
    """Record an operator on whole rows whose operand is nearly always the same number; False if it is not.

    Args:
        log: see `calculate_rows`.
        rows: see `calculate_rows`.
        vocab_size: number of columns.
        operator: see `ARITHMETIC`.
        values: float32 [rows or 1, vocab].
    """
    background = _background(values)
    if background is None:
        return False
    bits = values.reshape(-1).view(np.int32)
    (places,) = (bits != np.float32(background).view(np.int32)).nonzero()
    if len(places) * _FEW > bits.size:
        return False
    exceptions = values.reshape(-1)[places]
    own_rows, columns = np.divmod(places, vocab_size)
    if len(values) < len(rows):
        own_rows = np.repeat(np.arange(len(rows)), len(columns))
        columns, exceptions = np.tile(columns, len(rows)), np.tile(exceptions, len(rows))
    positions: Positions = np.array(rows, np.int64)[own_rows] * vocab_size + columns
    steps = ((operator, exceptions),)
    if _changes_nothing(operator, background):
        log.edit_positions(positions, steps)
    else:
        register = log.save(positions)
        log.edit_rows(rows, operator, background)
        log.restore(positions, register, steps)
    return True


def _background(values: Floats) -> float | None:
    """Return the number that two in three elements seem to be; None if there is none."""
    sample = values.reshape(-1)[:: values.size // _SAMPLE + 1].view(np.int32).tolist()
    [(bits, count)] = Counter(sample).most_common(1)
    number = float(np.int32(bits).view(np.float32))
    return number if count * 3 >= len(sample) * 2 and _is_certain(number) else None


def _changes_nothing(operator: str, number: float) -> bool:
    """Return whether an operator with this operand keeps all bits."""
    if operator in ("*", "/"):
        return number == 1.0
    # -0.0 + 0.0 is 0.0.
    return number == 0.0 and math.copysign(1.0, number) == (-1.0 if operator == "+" else 1.0)
