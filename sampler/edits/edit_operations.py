"""Edits of logits that do not exist yet: recorded by `promised_logits`, and applied once they exist.

A position is `row * vocab_size + token id`, within the rows of one call. Applying edits gives the same bits as the
tensor operations that they were recorded from: each is one float32 operation per element, in the recorded order. Edits
that are independent of each other form layers, so that few operations can apply or encode them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import copysign
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_EDITS = 64
MAX_EDITS_PER_ROW = 4
"""A log has at most `MAX_EDITS` edits and this many more per row, steps of arithmetic included. A call with more waits
for its logits."""

MAX_STEPS = 255
"""Maximum steps of arithmetic of an edit, whose binary form has one byte for their number."""

MAX_TOUCHED = 8
"""Maximum number of elements that the edits of a log touch, as a multiple of the number of logits."""

POSITION_COST = 4
"""Number of elements as which a position counts there: it takes longer to decode and to apply than an element of a
whole row."""

FEW = 64
"""Up to this many numbers, Python is faster than NumPy."""

Positions: TypeAlias = npt.NDArray[np.integer[Any]]
"""Recorded and applied as int64, sent as uint32."""
AnyPositions: TypeAlias = Sequence[int] | Positions
"""Positions or rows as they are recorded: integers [n]."""
Floats: TypeAlias = npt.NDArray[np.float32]
Operand: TypeAlias = float | Floats
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
"""Operators, of a value and an operand."""


class Put(NamedTuple):
    """Put a value at positions."""

    positions: Positions
    value: float


class Fill(NamedTuple):
    """Put a value in whole rows."""

    rows: Positions
    value: float


class Save(NamedTuple):
    """Copy the values at positions into a register. Registers are numbered from 0, in order."""

    positions: Positions
    register: int


class Restore(NamedTuple):
    """Apply arithmetic to the values of a register, and put them at as many distinct positions."""

    positions: Positions
    register: int
    arithmetic: tuple[tuple[str, Operand], ...]


class EditPositions(NamedTuple):
    """Apply arithmetic to the values at distinct positions: a `Save` and a `Restore` in one."""

    positions: Positions
    arithmetic: tuple[tuple[str, Operand], ...]


class EditRows(NamedTuple):
    """Apply an operator to whole rows; the operand is a number or has an element for each token."""

    rows: Positions
    operator: str
    operand: Operand


class PutRows(NamedTuple):
    """Put the same values, float32 [vocab], in whole rows."""

    rows: Positions
    values: Floats


class PutMask(NamedTuple):
    """Put a value where a mask is set.

    Attributes:
        bits: `numpy.packbits` of the mask: uint8 [1, ceil(vocab / 8)] for all rows, or [rows, ceil(vocab / 8)].
    """

    rows: Positions
    bits: npt.NDArray[np.uint8]
    value: float


WithPositions: TypeAlias = Put | Save | Restore | EditPositions
Edit: TypeAlias = WithPositions | Fill | EditRows | PutRows | PutMask

GroupEdits: TypeAlias = Sequence[Edit]
"""The edits of one call, in order."""


def num_touched(edits: GroupEdits, vocab_size: int) -> int:
    """Return about how many elements edits touch, see `MAX_TOUCHED`."""
    return sum(
        POSITION_COST * len(edit.positions) if isinstance(edit, WithPositions) else len(edit.rows) * vocab_size
        for edit in edits
    )


def num_positions(edits: GroupEdits) -> int:
    """Return the number of positions that edits name."""
    return sum(len(edit.positions) for edit in edits if isinstance(edit, WithPositions))


def touched_rows(edit: Edit, vocab_size: int) -> slice:
    """Return a range that contains all rows that an edit affects or uses."""
    numbers, numbers_per_row = (edit.positions, vocab_size) if isinstance(edit, WithPositions) else (edit.rows, 1)
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        smallest, largest = min(listed), max(listed)
    else:
        smallest, largest = int(numbers.min()), int(numbers.max())
    return slice(smallest // numbers_per_row, largest // numbers_per_row + 1)


def same_positions(one: AnyPositions, other: AnyPositions) -> bool:
    """Return whether both are the same positions in the same order."""
    if isinstance(one, list) and isinstance(other, list):
        return one == other
    # A third of the time of `numpy.array_equal`.
    return np.asarray(one, np.int64).tobytes() == np.asarray(other, np.int64).tobytes()


def same_number(one: Operand, other: Operand) -> bool:
    """Return whether both are the same number, also in the sign of zero. NaN is not."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one == other and copysign(1.0, one) == copysign(1.0, other)
