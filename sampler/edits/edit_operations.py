"""Edits of logits that do not exist yet: recorded by `promised_logits`, and applied once they exist.

A position is `row * vocab_size + token id`, within the rows of one call. Applying edits gives the same bits as the
tensor operations that they were recorded from: each is one float32 operation per element, in the recorded order. Edits
that are independent of each other form layers, so that few operations can apply or encode them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign, isfinite
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_EDITS = 64
MAX_EDITS_PER_ROW = 4
"""A log has at most `MAX_EDITS` edits and this many more per row, steps of arithmetic included. A call with more waits
for its logits."""

MAX_STEPS = 255
"""Maximum steps of arithmetic of a `Restore`, whose binary form has one byte for their number."""

MAX_TOUCHED = 8
"""Maximum number of elements that the edits of a log touch, as a multiple of the number of logits."""

FEW = 64
"""Up to this many numbers, Python is faster than NumPy."""

Positions: TypeAlias = npt.NDArray[np.integer[Any]]
"""Recorded as uint32, applied as int64."""
Floats: TypeAlias = npt.NDArray[np.float32]
Operand: TypeAlias = float | Floats
OPERATORS = ("+", "-", "*", "/", "r-")
"""Arithmetic of one operand; `r-` is the operand minus the value."""


class Put(NamedTuple):
    """Put values at positions, which are unique if the values differ."""

    positions: Positions
    values: Operand

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
        return _rows_between(self.positions, vocab_size)


class Fill(NamedTuple):
    """Put a value in whole rows."""

    rows: Positions
    value: float

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
        return _rows_between(self.rows, 1)


class Save(NamedTuple):
    """Copy the values at positions into a register. Registers are numbered from 0, in order."""

    positions: Positions
    register: int

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
        return _rows_between(self.positions, vocab_size)


class Restore(NamedTuple):
    """Apply arithmetic to the values of a register, and put them at as many distinct positions."""

    positions: Positions
    register: int
    arithmetic: tuple[tuple[str, Operand], ...]

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
        return _rows_between(self.positions, vocab_size)


class EditRows(NamedTuple):
    """Apply an operator to whole rows; the operand is a number or has an element for each token."""

    rows: Positions
    operator: str
    operand: Operand

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
        return _rows_between(self.rows, 1)


class PutRows(NamedTuple):
    """Put the same values, float32 [vocab], in whole rows."""

    rows: Positions
    values: Floats

    def touched(self, vocab_size: int) -> slice:
        """Return a range that contains all affected rows."""
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
        """Return a range that contains all affected rows."""
        return _rows_between(self.rows, 1)


Edit: TypeAlias = Put | Fill | Save | Restore | EditRows | PutRows | PutMask


def most_edits(num_rows: int) -> int:
    """Return the maximum number of edits of a log, steps of arithmetic included."""
    return MAX_EDITS + MAX_EDITS_PER_ROW * num_rows


GroupEdits: TypeAlias = Sequence[Edit]
"""The edits of one call, in order."""


def may_forbid_most(edits: GroupEdits, vocab_size: int) -> bool:
    """Return whether edits probably set all but a few logits of a row to -inf. A cheap heuristic."""
    return any(
        (isinstance(edit, Fill | PutMask) and edit.value == -np.inf)
        or isinstance(edit, PutRows)
        or (isinstance(edit, EditRows) and (isinstance(edit.operand, np.ndarray) or not isfinite(edit.operand)))
        or (isinstance(edit, Put) and len(edit.positions) >= vocab_size - 1)
        for edit in edits
    )


LayerPart: TypeAlias = tuple[int, Sequence[int], Edit]
"""Number of the call, its rows in the batch, and an edit."""


def edit_layers(groups: Sequence[tuple[Sequence[int], GroupEdits]], vocab_size: int) -> list[list[LayerPart]]:
    """Arrange the edits of several calls, which have no row in common, in layers of one kind.

    Each edit goes into the first layer of its kind after all earlier edits of its rows. So no two edits of a layer have
    a row in common, and the layers one after the other give what the edits in their own order give.

    Args:
        groups: for each call, the rows of the batch that are its rows 0, 1, …; and its edits.
        vocab_size: width of the logits.
    """
    layers: list[list[LayerPart]] = []
    kinds: list[type] = []
    for number, (rows, edits) in enumerate(groups):
        free = [0] * len(rows)  # for each row of the call, the first layer after its last edit
        saved: dict[int, int] = {}  # for each register, the first layer that may use it
        for edit in edits:
            touched = edit.touched(vocab_size) if len(edits) > 1 and len(rows) > 1 else slice(0, 1)
            at = max(free[touched])
            kind = type(edit)
            if isinstance(edit, Restore):
                at = max(at, saved[edit.register])  # the values may be those of other rows
            while at < len(layers) and kinds[at] is not kind:
                at += 1
            if at == len(layers):
                layers.append([])
                kinds.append(kind)
            layers[at].append((number, rows, edit))
            free[touched] = [at + 1] * len(free[touched])
            if isinstance(edit, Save):
                saved[edit.register] = at + 1
    return layers


def same_bits(one: Floats, other: Floats) -> bool:
    """Return whether float32 [vocab] are the same, also in the signs of zeros and in NaNs."""
    if one is other:
        return True
    bits, other_bits = one.view(np.int32), other.view(np.int32)
    # Compare a sample first: vectors that differ nearly always differ there.
    return np.array_equal(bits[::997], other_bits[::997]) and np.array_equal(bits, other_bits)


def same_number(one: Operand, other: Operand) -> bool:
    """Return whether both are the same number, also in the sign of zero. NaN is not."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one == other and copysign(1.0, one) == copysign(1.0, other)


def _rows_between(numbers: Positions, numbers_per_row: int) -> slice:
    if len(numbers) == 1:
        row = int(numbers[0]) // numbers_per_row
        return slice(row, row + 1)
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        smallest, largest = min(listed), max(listed)
    else:
        smallest, largest = int(numbers.min()), int(numbers.max())
    return slice(smallest // numbers_per_row, largest // numbers_per_row + 1)
