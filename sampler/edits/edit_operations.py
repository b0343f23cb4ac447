"""Edits of logits that do not exist yet: recorded by `promised_logits`, and applied when they do.

A position is `row * vocab_size + token id`, within the rows of one call. Applying edits gives the same bits as the
tensor operations that they were recorded from: each is one float32 operation per element, in the recorded order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MOST_EDITS = 64
MOST_EDITS_PER_ROW = 4
"""A log has at most `MOST_EDITS` edits, and this many more for each row. Steps of arithmetic count as edits. A
processor with more gets its logits."""

MOST_TOUCHED = 8
"""Most elements that the edits of a log touch, as a multiple of those of the logits."""

FEW = 64
"""Numbers that Python handles faster than NumPy."""

Positions: TypeAlias = npt.NDArray[np.integer[Any]]
"""Recorded as uint32, applied as int64."""
Floats: TypeAlias = npt.NDArray[np.float32]
Operand: TypeAlias = float | Floats
OPERATORS = ("+", "-", "*", "/", "r-")
"""Arithmetic of one operand; `r-` is the operand minus the value."""


class Put(NamedTuple):
    """Put values at positions. With values that differ, no position occurs twice."""

    positions: Positions
    values: Operand

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.positions, vocab_size)


class Fill(NamedTuple):
    """Put a value in whole rows."""

    rows: Positions
    value: float

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.rows, 1)


class Save(NamedTuple):
    """Copy the values at positions into a register. Registers are numbered from 0, in order."""

    positions: Positions
    register: int

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.positions, vocab_size)


class Restore(NamedTuple):
    """Put the values of a register at as many positions, none of which occurs twice, after some arithmetic."""

    positions: Positions
    register: int
    arithmetic: tuple[tuple[str, Operand], ...]

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.positions, vocab_size)


class EditRows(NamedTuple):
    """Apply an operator to whole rows; the operand is a number or has an element for each token."""

    rows: Positions
    operator: str
    operand: Operand

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.rows, 1)


class PutRows(NamedTuple):
    """Put the same values, float32 [vocab], in whole rows."""

    rows: Positions
    values: Floats

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.rows, 1)


class PutMask(NamedTuple):
    """Put a value where a mask is set.

    Attributes:
        bits: `numpy.packbits` of the mask: uint8 [1, ceil(vocab / 8)] for all rows, or [rows, ceil(vocab / 8)].
    """

    rows: Positions
    bits: npt.NDArray[np.uint8]
    value: float

    def touched(self, vocab_size: int) -> slice:
        """Return the rows that may be affected, all others are not."""
        return _rows_between(self.rows, 1)


Edit: TypeAlias = Put | Fill | Save | Restore | EditRows | PutRows | PutMask


def most_edits(num_rows: int) -> int:
    """Return the most edits of a log, and steps of their arithmetic."""
    return MOST_EDITS + MOST_EDITS_PER_ROW * num_rows


GroupEdits: TypeAlias = Sequence[Edit]
"""The edits of one call, in order."""


def same_bits(one: Floats, other: Floats) -> bool:
    """Return whether float32 [vocab] are the same, also in the signs of zeros and in NaNs."""
    if one is other:
        return True
    bits, other_bits = one.view(np.int32), other.view(np.int32)
    # A look at some elements first: most vectors differ there.
    return np.array_equal(bits[::997], other_bits[::997]) and np.array_equal(bits, other_bits)


def same_number(one: Operand, other: Operand) -> bool:
    """Return whether both are the same number, also in the sign of zero. NaN is not."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one == other and copysign(1.0, one) == copysign(1.0, other)


def _rows_between(numbers: Positions, numbers_per_row: int) -> slice:
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        smallest, largest = min(listed), max(listed)
    else:
        smallest, largest = int(numbers.min()), int(numbers.max())
    return slice(smallest // numbers_per_row, largest // numbers_per_row + 1)
