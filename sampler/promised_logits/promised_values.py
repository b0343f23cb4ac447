"""States of promised tensors: rows of logits, some of their elements, or values copied from them.

Every method that returns None or False has done nothing: the operation is then made on the real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from logitship.sampler.edits.edit_operations import MAX_STEPS, Operand

from .promised_index import Cells, Mask, Rows, Selection, few_positions, is_everything, plain_index
from .promised_memory import Memory
from .promised_operands import DenseOperand, is_plain, operand_of, scalar_of

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

    def alias(self) -> LogitsView | None:
        """Return another view of the same rows."""
        return LogitsView(self.memory, self.rows, self.is_one) if self.memory.is_pending else None

    def split(self) -> list[State] | None:
        """Return its rows."""
        if self.is_one or not self.memory.is_pending:
            return None
        return [LogitsView(self.memory, self.rows[at : at + 1], is_one=True) for at in range(len(self.rows))]

    def select(self, index: Any) -> Selection | None:
        """Return what an index selects; None if that is not certain."""
        source = self.memory.source
        return source.recent.selections.select(self.rows, self.is_one, source.vocab_size, index)

    def get(self, index: Any) -> State | None:
        """Return what an index selects."""
        if not self.memory.is_pending:
            return None
        chosen = self.select(index)
        if isinstance(chosen, Rows):
            return self._rows_at(chosen)
        if isinstance(chosen, Mask):
            chosen = chosen.cells(self.memory.source.vocab_size)
        if chosen is None:
            return None
        return CellView(self, index, chosen) if chosen.is_view else Values.saved(self.memory, chosen)

    def _rows_at(self, chosen: Rows) -> State | None:
        if chosen.is_view and isinstance(chosen.rows, range):
            return LogitsView(self.memory, chosen.rows, chosen.is_one)
        if chosen.is_one:
            row = chosen.rows[0]
            return LogitsView(self.memory, range(row, row + 1), is_one=True)
        return None

    def put(self, index: Any, value: Any) -> bool:
        """Assign to what an index selects."""
        if not self.memory.is_pending:
            return False
        number = scalar_of(value)
        return self._put_value(index, value) if number is None else self._put_number(index, number)

    def _put_number(self, index: Any, number: float) -> bool:
        memory = self.memory
        positions = few_positions(self.rows, self.is_one, memory.source.vocab_size, index)
        if positions is not None:
            memory.log.put_each(positions, number)
        elif is_everything(index):
            memory.log.fill(self.rows, number)
        else:
            chosen = self.select(index)
            if isinstance(chosen, Cells):
                memory.log.put(chosen.positions, number)
            elif isinstance(chosen, Rows):
                memory.log.fill(chosen.rows, number)
            elif isinstance(chosen, Mask):
                put_mask(memory, chosen.rows, chosen.mask, number)
            else:
                return False
        memory.limit()
        return True

    def _put_value(self, index: Any, value: Any) -> bool:
        memory = self.memory
        chosen = self.select(index)
        if isinstance(chosen, Rows):
            shape = (len(chosen.rows), memory.source.vocab_size)
            return self._put_rows(chosen.rows, shape[1:] if chosen.is_one else shape, value)
        if isinstance(chosen, Mask):
            chosen = chosen.cells(memory.source.vocab_size)
        return chosen is not None and put_cells(memory, chosen, value)

    def _put_rows(self, rows: Sequence[int], shape: tuple[int, ...], value: Any) -> bool:
        """Assign a tensor to whole rows; `shape` is that of the destination."""
        if isinstance(value, LogitsView):
            return self._put_promised(rows, shape, value)
        if is_plain(value, torch.float32) and value.ndim == len(shape) + 1 and len(value) == 1:
            value = value[0]
        operand = DenseOperand.of(value, rows, shape)
        if operand is None:
            return False
        operand.put(self.memory.log)
        self.memory.limit()
        return True

    def _put_promised(self, rows: Sequence[int], shape: tuple[int, ...], value: LogitsView) -> bool:
        """Assign promised rows to the same rows: themselves, or what was computed from them since."""
        if tuple(value.rows) != tuple(rows) or value.shape != shape:
            return False
        memory, other = self.memory, value.memory
        if other is memory:
            return True
        start = other.base_length
        if other.base is not memory or len(memory.log.edits) != start or not other.is_pending:
            return False
        if start and memory.log.edits[-1] is not other.log.edits[start - 1]:
            return False
        touched = (edit.touched(memory.source.vocab_size) for edit in other.log.edits[start:])
        if not all(set(range(part.start, part.stop)) <= set(rows) for part in touched):
            return False
        memory.log.extend(other.log, start)
        memory.limit()
        return True

    def copy(self) -> LogitsView | None:
        """Return a copy with values of its own."""
        if not self.memory.is_pending:
            return None
        return LogitsView(Memory(self.memory.source, self.memory), self.rows, self.is_one)

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        memory = self.memory
        if not memory.is_pending or not self.rows:
            return False
        number = scalar_of(operand, max_dims=len(self.shape))
        if number is not None:
            memory.log.edit_rows(self.rows, operator, number)
        else:
            dense = DenseOperand.of(operand, self.rows, self.shape)
            if dense is None:
                return False
            dense.calculate(memory.log, operator)
        memory.limit()
        return True

    def fill_mask(self, mask: Any, value: Any) -> bool:
        """Put a value where a mask is set, in place."""
        memory = self.memory
        number = scalar_of(value)
        if not memory.is_pending or number is None or not is_plain(mask, torch.bool):
            return False
        vocab_size = memory.source.vocab_size
        if mask.shape == (len(self.rows), 1) and not self.is_one:
            chosen = [row for row, is_set in zip(self.rows, mask.squeeze(1).tolist(), strict=True) if is_set]
            memory.log.fill(chosen, number)
        elif mask.shape == (1, vocab_size) and not self.is_one:
            put_mask(memory, self.rows, mask[0], number)
        elif mask.shape in ((vocab_size,), self.shape):
            put_mask(memory, self.rows, mask, number)
        else:
            return False
        memory.limit()
        return True


class CellView:
    """Some elements of a view, in the same memory: `logits[0, 5]`, `logits[:, 5]`, `logits[0, 3:9]`."""

    __slots__ = ("_cells", "_index", "_parent", "made", "memory", "shape")

    is_contiguous = False  # not known

    def __init__(self, parent: LogitsView, index: Any, cells: Cells) -> None:
        self.memory = parent.memory
        self.shape = cells.shape
        self._parent = parent
        # A tensor in it may change until the logits are there.
        self._index = tuple(map(plain_index, index)) if type(index) is tuple else plain_index(index)
        self._cells = cells
        self.made: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor:
        """The tensor that it stands for. Waits for the logits."""
        if self.made is None:
            parent = self._parent  # not its tensor, whose shape the author may have changed in place
            self.made = LogitsView(parent.memory, parent.rows, parent.is_one).real[self._index]
        return self.made

    def alias(self) -> None:
        """Return None: other views of it are not recorded."""

    def split(self) -> None:
        """Return None: its elements have no states of their own."""

    def get(self, index: Any) -> None:
        """Return None: its elements have no states of their own."""

    def put(self, index: Any, value: Any) -> bool:
        """Assign to all elements."""
        # A slice of a single element raises.
        if not self.memory.is_pending or not is_everything(index) or (not self.shape and index is not Ellipsis):
            return False
        return put_cells(self.memory, self._cells, value)

    def is_same(self, cells: Cells) -> bool:
        """Return whether these are its elements."""
        own = self._cells
        return own is cells or (own.shape == cells.shape and np.array_equal(own.positions, cells.positions))

    def copy(self) -> Values | None:
        """Return a copy with values of its own."""
        return Values.saved(self.memory, self._cells) if self.memory.is_pending else None

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        return self.memory.is_pending and calculate_cells(self.memory, self._cells, operator, operand)

    def fill_mask(self, mask: Any, value: Any) -> bool:
        """Return False: such masks are not recorded."""
        return False


class Values:
    """Values copied from a memory, after some arithmetic.

    Args:
        memory: the memory.
        register: number of the register that has the values of `cells`, of each position once.
        cells: their positions.
        arithmetic: what was computed, see `OPERATORS`.
    """

    __slots__ = ("_arithmetic", "_cells", "_register", "made", "memory", "shape")

    is_contiguous = True

    def __init__(
        self, memory: Memory, register: int, cells: Cells, arithmetic: tuple[tuple[str, Operand], ...] = ()
    ) -> None:
        self.memory = memory
        self.shape = cells.shape
        self._register = register
        self._cells = cells
        self._arithmetic = arithmetic
        self.made: torch.Tensor | None = None

    @classmethod
    def saved(cls, memory: Memory, cells: Cells) -> Values:
        """Copy elements of a memory."""
        positions = cells.positions if cells.is_unique else np.unique(cells.positions)
        values = cls(memory, memory.log.save(positions), cells)
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
            elif self._cells.is_unique:
                values = self.memory.registers[self._register].clone()
            else:
                inverse = np.unique(positions, return_inverse=True)[1]
                values = self.memory.registers[self._register][torch.from_numpy(inverse)]
            for operator, operand in self._arithmetic:
                values = calculated(values, operator, operand)
            self.made = values.view(self.shape)
        return self.made

    def alias(self) -> None:
        """Return None: other views of it are not recorded."""

    def split(self) -> None:
        """Return None: its elements have no states of their own."""

    def get(self, index: Any) -> None:
        """Return None: its elements have no states of their own."""

    def put(self, index: Any, value: Any) -> bool:
        """Return False: assignments to elements are not recorded."""
        return False

    def copy(self) -> Values | None:
        """Return a copy."""
        if self.made is not None:
            return None
        return Values(self.memory, self._register, self._cells, self._arithmetic)

    def calculate(self, operator: str, operand: Any) -> bool:
        """Apply an operator to all elements, in place."""
        if self.made is not None or len(self._arithmetic) == MAX_STEPS:
            return False
        step = operand_of(operand, self.shape)
        if step is None or (isinstance(step, np.ndarray) and not self._cells.is_unique):
            return False
        self._arithmetic = (*self._arithmetic, (operator, step))
        return True

    def fill_mask(self, mask: Any, value: Any) -> bool:
        """Return False: such masks are not recorded."""
        return False

    def restore(self, memory: Memory, cells: Cells) -> bool:
        """Put the values at positions of their memory."""
        if memory is not self.memory or self.made is not None or self.shape != cells.shape:
            return False
        positions = cells.positions
        if not self._cells.is_unique:
            # Several values for a position are the same, if they go back to where they are from.
            if not np.array_equal(positions, self._cells.positions):
                return False
            positions = np.unique(positions)
        elif not cells.is_unique:
            return False
        memory.log.restore(positions, self._register, self._arithmetic)
        memory.limit()
        return True


State: TypeAlias = LogitsView | CellView | Values


def cells_of(state: State, index: Any) -> Cells | None:
    """Return the elements of logits that an index selects; None if it is not certain, or selects anything else."""
    if not isinstance(state, LogitsView) or not state.memory.is_pending:
        return None
    chosen = state.select(index)
    return chosen if isinstance(chosen, Cells) else None


def put_cells(memory: Memory, cells: Cells, value: Any) -> bool:
    """Assign a number, a tensor or promised values to elements."""
    if isinstance(value, Values):
        return value.restore(memory, cells)
    if isinstance(value, CellView):
        return value.memory is memory and value.is_same(cells)
    operand = operand_of(value, cells.shape)
    if operand is None or (isinstance(operand, np.ndarray) and not cells.is_unique):
        return False
    memory.log.put(cells.positions, operand)
    memory.limit()
    return True


def calculate_cells(memory: Memory, cells: Cells, operator: str, operand: Any) -> bool:
    """Apply an operator to distinct elements."""
    own = operand_of(operand, cells.shape)
    if own is None:
        return False
    memory.log.edit_positions(cells.positions, ((operator, own),))
    memory.limit()
    return True


def put_mask(memory: Memory, rows: Sequence[int], mask: torch.Tensor, number: float) -> None:
    """Put a number where a mask, bool [vocab] or [rows, vocab], is set."""
    if mask.ndim == 2 and len(rows) == 1:
        mask = mask[0]
    bits = mask.numpy()
    if np.count_nonzero(bits) * _FEW <= bits.size:
        vocab_size = memory.source.vocab_size
        starts = np.array(rows, np.int64) * vocab_size
        if bits.ndim == 1:
            positions = (starts[:, None] + bits.nonzero()[0]).reshape(-1)
        else:
            own_rows, columns = bits.nonzero()
            positions = starts[own_rows] + columns
        memory.log.put(positions, number)
    else:
        memory.log.put_mask(rows, mask, number)


def calculated(values: torch.Tensor, operator: str, operand: Operand) -> torch.Tensor:
    """Apply an operator to values, as `merged_edits` does."""
    other = torch.from_numpy(operand) if isinstance(operand, np.ndarray) else operand
    if operator == "+":
        return values + other
    if operator == "-":
        return values - other
    if operator == "*":
        return values * other
    return values / other if operator == "/" else other - values
