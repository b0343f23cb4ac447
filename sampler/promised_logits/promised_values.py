"""States of promised tensors: rows of logits, some of their elements, or values copied from them.

Every method that returns None or False has done nothing: the operation is then made on the real tensors.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from logitship.sampler.edits.edit_operations import ARITHMETIC, MAX_STEPS, Operand, same_positions

from .promised_index import Cells, Mask, Rows, Selection, select
from .promised_memory import Memory
from .promised_operands import calculate_rows, is_plain, operand_of, scalar_of

_FEW = 32
"""A mask is recorded as positions if it is set for at most one in this many elements."""


class LogitsView:
    """Rows of a memory: [rows, vocab], or [vocab] if `is_one`.

    Attributes:
        memory: has their values.
        rows: their numbers, without gaps or with a constant step.
        is_one: True if it is one row without a dimension of rows.
        made: the tensor that it stands for, once somebody used it.
    """

    __slots__ = ("is_one", "made", "memory", "rows", "shape")

    def __init__(self, memory: Memory, rows: range, is_one: bool) -> None:
        self.memory = memory
        self.rows = rows
        self.is_one = is_one
        vocab_size = memory.source.vocab_size
        self.shape = (vocab_size,) if is_one else (len(rows), vocab_size)
        self.made: torch.Tensor | None = None

    @property
    def is_contiguous(self) -> bool:
        """True if there is nothing between its elements."""
        return self.rows.step == 1 or len(self.rows) < 2

    @property
    def is_whole(self) -> bool:
        """True if it has all rows in order."""
        return not self.is_one and self.rows == range(self.memory.source.num_rows)

    @property
    def real(self) -> torch.Tensor:
        """The tensor that it stands for. Waits for the logits."""
        if self.made is None:
            values = self.memory.read()
            if self.is_one:
                self.made = values[self.rows[0]]
            elif self.is_whole:
                self.made = values.detach()  # authors may change its shape in place, while there are other views
            else:
                self.made = values[self.rows.start : self.rows.stop : self.rows.step]
        return self.made

    def split(self) -> list[LogitsView] | None:
        """Return its rows."""
        if self.is_one or not self.memory.is_pending:
            return None
        return [LogitsView(self.memory, self.rows[at : at + 1], is_one=True) for at in range(len(self.rows))]

    def select(self, index: Any) -> Selection | None:
        """Return what an index selects; None if it is of another form."""
        if not self.memory.is_pending:
            return None
        return select(self.rows, self.is_one, self.memory.source.vocab_size, index)

    def get(self, index: Any) -> State | None:
        """Return what an index selects."""
        chosen = self.select(index)
        if isinstance(chosen, Mask):
            chosen = chosen.cells(self.memory.source.vocab_size)
        if isinstance(chosen, Rows):
            return LogitsView(self.memory, chosen.rows, chosen.is_one)
        if chosen is None:
            return None
        return CellView(self, index, chosen) if chosen.is_view else Values.saved(self.memory, chosen)

    def put(self, index: Any, value: Any) -> bool:
        """Assign to what an index selects."""
        chosen, number = self.select(index), scalar_of(value)
        if isinstance(chosen, Mask):
            if number is not None:
                return self._put_mask(chosen, number)
            chosen = chosen.cells(self.memory.source.vocab_size)
        if isinstance(chosen, Cells):
            return _put_cells(self.memory, chosen, value, number)
        if chosen is None:
            return False
        if isinstance(value, LogitsView):
            # Promised rows are assigned to the same rows only: themselves, or what was computed from them since.
            is_same = (value.rows, value.is_one) == chosen
            return is_same and (value.memory is self.memory or self.memory.take_back(value.memory, value.rows))
        if number is not None:
            self.memory.log.fill(chosen.rows, number)
        elif is_plain(value, torch.float32) and value.shape == self.shape[-1:]:
            self.memory.log.put_rows(chosen.rows, value.numpy())
        else:
            return False
        self.memory.limit()
        return True

    def _put_mask(self, chosen: Mask, number: float) -> bool:
        bits = chosen.mask.numpy()
        if np.count_nonzero(bits) * _FEW <= bits.size:
            self.memory.log.put(chosen.cells(self.memory.source.vocab_size).positions, number)
        else:
            self.memory.log.put_mask(chosen.rows, chosen.mask, number)
        self.memory.limit()
        return True

    def copy(self) -> LogitsView | None:
        """Return a copy with values of its own."""
        if not self.memory.is_pending:
            return None
        return LogitsView(Memory(self.memory.source, self.memory), self.rows, self.is_one)

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        memory = self.memory
        if not memory.is_pending or not calculate_rows(memory.log, self.rows, self.shape, operator, operand):
            return False
        memory.limit()
        return True

    def fill_mask(self, mask: Any, value: Any) -> bool:
        """Put a value where a mask is set, in place."""
        number = scalar_of(value)
        if not self.memory.is_pending or number is None or not is_plain(mask, torch.bool):
            return False
        if mask.shape not in (self.shape[-1:], self.shape):
            return False
        return self._put_mask(Mask(self.rows, mask, self.is_one), number)


class CellView:
    """Some elements of a view, in the same memory: `logits[0, 5]`, `logits[:, 5]`, `logits[0, 3:9]`."""

    __slots__ = ("_cells", "_index", "_parent", "made", "memory", "shape")

    is_contiguous = False  # not known

    def __init__(self, parent: LogitsView, index: Any, cells: Cells) -> None:
        self.memory = parent.memory
        self.shape = cells.shape
        self._parent = parent
        self._index = index  # numbers and slices, which do not change
        self._cells = cells
        self.made: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """The tensor that it stands for. Waits for the logits."""
        if self.made is None:
            parent = self._parent  # not its tensor, whose shape the author may have changed in place
            self.made = LogitsView(parent.memory, parent.rows, parent.is_one).real[self._index]
        return self.made

    def is_same(self, memory: Memory, cells: Cells) -> bool:
        """Return whether these are its elements."""
        own = self._cells
        return memory is self.memory and own.shape == cells.shape and same_positions(own.positions, cells.positions)

    def copy(self) -> Values | None:
        """Return a copy with values of its own."""
        return Values.saved(self.memory, self._cells) if self.memory.is_pending else None

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        return self.memory.is_pending and calculate_cells(self.memory, self._cells, operator, operand)


class Values:
    """Values copied from a memory, after some arithmetic.

    Args:
        memory: the memory.
        register: number of the register that has the values of `cells`, of each position once.
        cells: their positions.
        are_distinct: True if no position occurs twice.
        arithmetic: what was computed, see `ARITHMETIC`; only with numbers if a position occurs twice.
    """

    __slots__ = ("_are_distinct", "_arithmetic", "_cells", "_register", "made", "memory", "shape")

    is_contiguous = True

    def __init__(
        self,
        memory: Memory,
        register: int,
        cells: Cells,
        are_distinct: bool,
        arithmetic: tuple[tuple[str, Operand], ...] = (),
    ) -> None:
        self.memory = memory
        self.shape = cells.shape
        self._register = register
        self._cells = cells
        self._are_distinct = are_distinct
        self._arithmetic = arithmetic
        self.made: torch.Tensor | None = None

    @classmethod
    def saved(cls, memory: Memory, cells: Cells) -> Values:
        """Copy elements of a memory."""
        are_distinct = cells.are_distinct
        positions = cells.positions if are_distinct else np.unique(cells.positions)
        values = cls(memory, memory.log.save(positions), cells, are_distinct)
        memory.limit()
        return values

    @property
    def real(self) -> torch.Tensor:
        """The tensor that it stands for. Waits for the logits."""
        if self.made is None:
            self.memory.read()
            positions = self._cells.positions
            if len(positions) == 0:
                values = torch.empty(0, dtype=torch.float32)  # not the default of the author's code
            elif self._are_distinct:
                values = self.memory.registers[self._register].clone()
            else:
                inverse = np.unique(positions, return_inverse=True)[1]
                values = self.memory.registers[self._register][torch.from_numpy(inverse)]
            for operator, operand in self._arithmetic:
                other = torch.from_numpy(operand) if isinstance(operand, np.ndarray) else operand
                values = ARITHMETIC[operator](values, other)
            made: torch.Tensor = values.view(self.shape)
            self.made = made
        return self.made

    def copy(self) -> Values | None:
        """Return a copy."""
        if self.made is not None:
            return None
        return Values(self.memory, self._register, self._cells, self._are_distinct, self._arithmetic)

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        step = operand_of(operand, self.shape)
        if self.made is not None or len(self._arithmetic) == MAX_STEPS or step is None:
            return False
        if isinstance(step, np.ndarray) and not self._are_distinct:
            return False
        self._arithmetic = (*self._arithmetic, (operator, step))
        return True

    def restore(self, memory: Memory, cells: Cells) -> bool:
        """Put the values at positions of their memory."""
        if memory is not self.memory or self.made is not None or self.shape != cells.shape:
            return False
        positions = cells.positions
        if same_positions(positions, self._cells.positions):
            if not self._are_distinct:  # several values for a position are the same
                positions = np.unique(positions)
        elif not self._are_distinct or not cells.are_distinct:
            return False
        memory.log.restore(positions, self._register, self._arithmetic)
        memory.limit()
        return True


State: TypeAlias = LogitsView | CellView | Values


def _put_cells(memory: Memory, cells: Cells, value: Any, number: float | None) -> bool:
    """Assign a number, or else promised values, to elements."""
    if isinstance(value, Values):
        return value.restore(memory, cells)
    if isinstance(value, CellView):
        return value.is_same(memory, cells)
    if number is None:
        return False
    memory.log.put(cells.positions, number)
    memory.limit()
    return True


def calculate_cells(memory: Memory, cells: Cells, operator: str, operand: Any) -> bool:
    """Apply an operator to distinct elements."""
    step = operand_of(operand, cells.shape)
    if step is None:
        return False
    memory.log.edit_positions(cells.positions, ((operator, step),))
    memory.limit()
    return True
