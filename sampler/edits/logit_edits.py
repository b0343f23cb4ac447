"""Records edits of logits that do not exist yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .edit_operations import (
    MAX_EDITS,
    MAX_EDITS_PER_ROW,
    MAX_TOUCHED,
    POSITION_COST,
    Edit,
    EditPositions,
    EditRows,
    Fill,
    Floats,
    Operand,
    Positions,
    Put,
    PutMask,
    PutRows,
    Restore,
    Save,
    same_bits,
    same_number,
)
from .merged_edits import apply_edits

_DTYPE = np.dtype(np.uint32)
NUM_RECENT_VECTORS = 4
_MAX_JOINED = 4096
"""Positions of an edit to which later ones are still added. Adding copies an edit, so larger ones are left alone."""

AnyPositions: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Positions as an author's code has them: integers [n]."""


class RecentVectors:
    """Copies of the vectors that were recorded last.

    A processor often adds the same vector at every step, and a comparison takes less time than a copy.
    """

    def __init__(self) -> None:
        self._copies: deque[Floats] = deque(maxlen=NUM_RECENT_VECTORS)

    def copy_of(self, vector: Floats) -> Floats:
        """Return a copy of float32 [vocab]; the same one as before if the bits are the same."""
        for known in list(self._copies):
            if same_bits(vector, known):
                return known
        copy = vector.copy()
        self._copies.append(copy)
        return copy


class _NumberPut:
    """Put the same number at positions, of which there may be more until the next edit.

    A processor often forbids tokens one by one, and an array takes longer to make than a list to extend.
    """

    __slots__ = ("positions", "value")

    def __init__(self, positions: list[int], value: float) -> None:
        self.positions = positions
        self.value = value


class EditLog:
    """Records edits of float32 [num_rows, vocab_size] logits, in order.

    It copies positions and vectors, because their owner may change them. It shares uint32 positions, the lists of
    `put_each` and the operands of single elements, which belong to it from then on. It checks nothing.

    Args:
        num_rows: rows of the call.
        vocab_size: width of the logits; the number of positions is below 2**31.
        vectors: those of earlier calls; None: of this call alone.
    """

    __slots__ = (
        "_edits",
        "_most_edits",
        "_most_touched",
        "_num_registers",
        "_num_steps",
        "_num_touched",
        "num_rows",
        "vectors",
        "vocab_size",
    )

    def __init__(self, num_rows: int, vocab_size: int, vectors: RecentVectors | None = None) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self._edits: list[Edit | _NumberPut] = []
        self._num_registers = 0
        self._num_steps = 0
        self._num_touched = 0
        self._most_edits = MAX_EDITS + MAX_EDITS_PER_ROW * num_rows
        self._most_touched = MAX_TOUCHED * num_rows * vocab_size
        self.vectors = vectors or RecentVectors()

    def copy(self) -> EditLog:
        """Return a log with the same edits, to which others may be added."""
        copy = EditLog(self.num_rows, self.vocab_size, self.vectors)
        copy._edits += self.edits
        copy._take_counts(self)
        return copy

    @property
    def edits(self) -> list[Edit]:
        """The edits so far."""
        edits = self._edits
        for number, edit in enumerate(edits):
            if type(edit) is _NumberPut:
                edits[number] = Put(np.array(edit.positions, _DTYPE), edit.value)
        return edits  # type: ignore[return-value]  # there are no others now

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded."""
        return not self._edits

    @property
    def is_full(self) -> bool:
        """True if the log is too long to be sent."""
        return len(self._edits) + self._num_steps > self._most_edits or self._num_touched > self._most_touched

    def put(self, positions: AnyPositions, value: Operand) -> None:
        """Put one value, or float32 [positions], at positions, int64 [n]."""
        put = Put(_positions(positions), value)
        last = self._edits[-1] if self._edits else None
        if type(last) is Put and len(last.positions) < _MAX_JOINED and same_number(last.values, put.values):
            # A processor often forbids tokens row by row.
            self._edits.pop()
            put = Put(np.concatenate((last.positions, put.positions)), put.values)
            self._num_touched -= POSITION_COST * len(last.positions)
        self._add(put, POSITION_COST * len(put.positions))

    def put_each(self, positions: list[int], value: float) -> None:
        """Put a value at a few positions."""
        last = self._edits[-1] if self._edits else None
        if type(last) is _NumberPut and same_number(last.value, value):
            last.positions += positions
        elif positions:
            self._edits.append(_NumberPut(positions, value))
        self._num_touched += POSITION_COST * len(positions)

    def fill(self, rows: Sequence[int], value: float) -> None:
        """Put a value in whole rows."""
        self._add(Fill(_positions(rows), value), len(rows) * self.vocab_size)

    def save(self, positions: AnyPositions) -> int:
        """Copy the values at positions. Return the number of the register that has them."""
        if len(positions) == 0:
            return -1  # `restore` ignores it too
        register = self._num_registers
        self._num_registers += 1
        self._add(Save(_positions(positions), register), POSITION_COST * len(positions))
        return register

    def restore(
        self,
        positions: AnyPositions,
        register: int,
        arithmetic: Sequence[tuple[str, Operand]] = (),
    ) -> None:
        """Put the values of a register at positions after some arithmetic, see `OPERATORS`.

        Operands are numbers or float32 [positions].
        """
        steps = tuple(arithmetic)
        self._num_steps += len(steps)
        self._add(Restore(_positions(positions), register, steps), len(positions) * (POSITION_COST + len(steps)))

    def edit_positions(self, positions: AnyPositions, arithmetic: Sequence[tuple[str, Operand]]) -> None:
        """Apply arithmetic to the values at distinct positions, see `restore`."""
        steps = tuple(arithmetic)
        self._num_steps += len(steps)
        self._add(EditPositions(_positions(positions), steps), len(positions) * (POSITION_COST + len(steps)))

    def edit_rows(self, rows: Sequence[int], operator: str, operand: Operand) -> None:
        """Apply an operator to whole rows; the operand is a number or float32 [vocab]."""
        own = self.vectors.copy_of(operand) if isinstance(operand, np.ndarray) else operand
        self._add(EditRows(_positions(rows), operator, own), len(rows) * self.vocab_size)

    def put_rows(self, rows: Sequence[int], values: Floats) -> None:
        """Put the same float32 [vocab] in whole rows."""
        self._add(PutRows(_positions(rows), self.vectors.copy_of(values)), len(rows) * self.vocab_size)

    def put_mask(self, rows: Sequence[int], mask: torch.Tensor, value: float) -> None:
        """Put a value where a mask, bool [vocab] for all rows or [rows, vocab], is set."""
        bits = np.packbits(np.atleast_2d(mask.detach().numpy()), axis=1)
        self._add(PutMask(_positions(rows), bits, value), len(rows) * self.vocab_size)

    def extend(self, other: EditLog, start: int) -> None:
        """Add the edits of another log from number `start` on; before that, it has the same edits as this one."""
        self._edits += other.edits[start:]
        self._take_counts(other)

    def apply_to(self, logits: torch.Tensor) -> dict[int, torch.Tensor]:
        """Apply the edits to float32 [num_rows, vocab_size] logits, in place. Return the registers."""
        (registers,) = apply_edits(logits, [(range(self.num_rows), self.edits)])
        return {number: torch.as_tensor(values) for number, values in registers.items()}

    def _take_counts(self, other: EditLog) -> None:
        self._num_registers, self._num_steps = other._num_registers, other._num_steps
        self._num_touched = other._num_touched

    def _add(self, edit: Edit, num_touched: int) -> None:
        if num_touched:
            self._edits.append(edit)
            self._num_touched += num_touched


def _positions(numbers: AnyPositions) -> Positions:
    if isinstance(numbers, np.ndarray) and numbers.dtype == _DTYPE:
        return numbers
    if isinstance(numbers, torch.Tensor):
        positions: Positions = numbers.numpy().astype(_DTYPE)
        return positions
    if type(numbers) is range:
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=_DTYPE)
    return np.array(numbers, _DTYPE)
