"""Records edits of logits that do not exist yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from .edit_operations import (
    MAX_EDITS,
    MAX_EDITS_PER_ROW,
    MAX_TOUCHED,
    POSITION_COST,
    AnyPositions,
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
    same_number,
)
from .merged_edits import apply_edits

NUM_RECENT_VECTORS = 4


class RecentVectors:
    """Copies of the vectors that were recorded last.

    A processor often adds the same vector at every step, and a comparison takes less time than a copy.
    """

    def __init__(self) -> None:
        self._copies: deque[Floats] = deque(maxlen=NUM_RECENT_VECTORS)

    def copy_of(self, vector: Floats) -> Floats:
        """Return a copy of float32 [vocab]; the same one as before if the bits are the same."""
        bits = vector.view(np.int32)
        for known in list(self._copies):
            known_bits = known.view(np.int32)
            # Compare a sample first: vectors that differ nearly always differ there.
            if np.array_equal(bits[::997], known_bits[::997]) and np.array_equal(bits, known_bits):
                return known
        copy = vector.copy()
        self._copies.append(copy)
        return copy


class _OpenPut:
    """A put of a number, to whose positions those of the next ones are added: many forbid tokens one by one."""

    __slots__ = ("arrays", "listed", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.listed: list[int] = []
        self.arrays: list[Positions] = []


class EditLog:
    """Records edits of float32 [num_rows, vocab_size] logits, in order.

    It copies rows, masks and the vectors of whole rows. The arrays of positions and of their operands belong to it from
    then on. It checks nothing.

    Args:
        num_rows: rows of the call.
        vocab_size: width of the logits; the number of positions is below 2**31.
        vectors: those of earlier calls; None: of this call alone.
    """

    __slots__ = ("_edits", "_num_registers", "_num_steps", "_num_touched", "num_rows", "vectors", "vocab_size")

    def __init__(self, num_rows: int, vocab_size: int, vectors: RecentVectors | None = None) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.vectors = vectors or RecentVectors()
        self._edits: list[Edit | _OpenPut] = []
        self._num_registers = 0
        self._num_steps = 0
        self._num_touched = 0

    def copy(self) -> EditLog:
        """Return a log with the same edits, to which others may be added."""
        copy = EditLog(self.num_rows, self.vocab_size, self.vectors)
        copy.extend(self, 0)
        return copy

    @property
    def edits(self) -> list[Edit]:
        """The edits so far. Nothing is added to any of them any more."""
        edits = self._edits
        for number, edit in enumerate(edits):
            if type(edit) is _OpenPut:
                listed = np.array(edit.listed, np.int64)
                edits[number] = Put(np.concatenate((listed, *edit.arrays)) if edit.arrays else listed, edit.value)
        return edits  # type: ignore[return-value]  # there are no others now

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded."""
        return not self._edits

    @property
    def is_full(self) -> bool:
        """True if the log is too long to be sent."""
        return (
            len(self._edits) + self._num_steps > MAX_EDITS + MAX_EDITS_PER_ROW * self.num_rows
            or self._num_touched > MAX_TOUCHED * self.num_rows * self.vocab_size
        )

    def put(self, positions: AnyPositions, value: float) -> None:
        """Put a value at positions."""
        if len(positions) == 0:
            return
        last = self._edits[-1] if self._edits else None
        if type(last) is not _OpenPut or not same_number(last.value, value):
            last = _OpenPut(value)
            self._edits.append(last)
        if isinstance(positions, list):
            last.listed += positions
        else:
            last.arrays.append(_numbers(positions))
        self._num_touched += POSITION_COST * len(positions)

    def fill(self, rows: Sequence[int], value: float) -> None:
        """Put a value in whole rows."""
        self._add(Fill(_numbers(rows), value), len(rows) * self.vocab_size)

    def save(self, positions: AnyPositions) -> int:
        """Copy the values at positions. Return the number of the register that has them."""
        if len(positions) == 0:
            return -1  # `restore` ignores it too
        register = self._num_registers
        self._num_registers += 1
        self._add(Save(_numbers(positions), register), POSITION_COST * len(positions))
        return register

    def restore(self, positions: AnyPositions, register: int, arithmetic: Sequence[tuple[str, Operand]] = ()) -> None:
        """Put the values of a register at distinct positions after some arithmetic, see `ARITHMETIC`.

        Operands are numbers or float32 [positions].
        """
        self._add_arithmetic(Restore(_numbers(positions), register, tuple(arithmetic)))

    def edit_positions(self, positions: AnyPositions, arithmetic: Sequence[tuple[str, Operand]]) -> None:
        """Apply arithmetic to the values at distinct positions, see `restore`."""
        self._add_arithmetic(EditPositions(_numbers(positions), tuple(arithmetic)))

    def edit_rows(self, rows: Sequence[int], operator: str, operand: Operand) -> None:
        """Apply an operator to whole rows; the operand is a number or float32 [vocab]."""
        own = self.vectors.copy_of(operand) if isinstance(operand, np.ndarray) else operand
        self._add(EditRows(_numbers(rows), operator, own), len(rows) * self.vocab_size)

    def put_rows(self, rows: Sequence[int], values: Floats) -> None:
        """Put the same float32 [vocab] in whole rows."""
        self._add(PutRows(_numbers(rows), self.vectors.copy_of(values)), len(rows) * self.vocab_size)

    def put_mask(self, rows: Sequence[int], mask: torch.Tensor, value: float) -> None:
        """Put a value where a mask, bool [vocab] for all rows or [rows, vocab], is set."""
        bits = np.packbits(np.atleast_2d(mask.detach().numpy()), axis=1)
        self._add(PutMask(_numbers(rows), bits, value), len(rows) * self.vocab_size)

    def extend(self, other: EditLog, start: int) -> None:
        """Add the edits of another log from number `start` on; before that, it has the same edits as this one."""
        self._edits += other.edits[start:]
        self._num_registers, self._num_steps = other._num_registers, other._num_steps
        self._num_touched = other._num_touched

    def apply_to(self, logits: torch.Tensor) -> dict[int, torch.Tensor]:
        """Apply the edits to float32 [num_rows, vocab_size] logits, in place. Return the registers."""
        (registers,) = apply_edits(logits, [(range(self.num_rows), self.edits)])
        return {number: torch.as_tensor(values) for number, values in registers.items()}

    def _add_arithmetic(self, edit: Restore | EditPositions) -> None:
        num_steps = len(edit.arithmetic)
        self._num_steps += num_steps
        self._add(edit, len(edit.positions) * (POSITION_COST + num_steps))

    def _add(self, edit: Edit, num_touched: int) -> None:
        if num_touched:
            self._edits.append(edit)
            self._num_touched += num_touched


def _numbers(numbers: AnyPositions) -> Positions:
    return np.asarray(numbers, np.int64)
