"""Indices of promised logits: the positions that an author's index selects, as PyTorch would select them.

Everything here returns None for what it does not know for certain: PyTorch then indexes the real logits, and raises its
own errors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.edits.edit_operations import FEW, Positions

Numbers: TypeAlias = npt.NDArray[np.int64]

_INTEGERS = frozenset({int, np.int64})
_INT_TYPES = (torch.int64, torch.int32)
_COLON = slice(None)
_ALL_ROWS, _NO_ROWS = "all", "none"
"""Keys for an index with `:` before its numbers, which has no hash in Python 3.11, and for one with numbers alone."""
_MAX_RECENT = 1 << 12
"""Most numbers of an index that may be in `RecentSelections`."""
_MAX_KEPT = 1 << 18
"""Most elements of all selections there."""
_MIN_KEPT = 64
"""Minimum number of elements that a selection counts as."""
_ADJACENT = (1,)
"""Stride of a one-dimensional tensor with nothing between its elements."""
_FEW_NUMBERS = 16
"""For this many numbers of an index, or fewer, computing the positions is faster than finding `RecentSelections`."""
_MANY_NUMBERS, _MOST_PLACES_EACH = 512, 64
"""Equal numbers are detected without sorting if there are at least this many, and at most this many values for each."""
_FEW_PLACES = 8
"""Values at a mask are recorded by position if it is set for at most one in this many elements."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows.

    Attributes:
        rows: row numbers.
        is_view: True if PyTorch returns a view of them.
        is_one: True if the index removes the dimension of rows.
    """

    rows: Sequence[int]
    is_view: bool
    is_one: bool = False


class Cells:
    """Some elements.

    Args:
        positions: their positions, integers [n], of which it keeps a copy.
        shape: shape of the result; its elements are the positions in order.
        is_view: True if PyTorch returns a view of them.
        maybe_equal: numbers of which one occurs twice if a position does; None if none does.

    Attributes:
        may_be_negative: False once no number of the index is known to be negative, which methods like `index_add_`
            refuse.
    """

    __slots__ = ("_maybe_equal", "is_view", "may_be_negative", "positions", "shape")

    def __init__(
        self, positions: Numbers, shape: tuple[int, ...], *, is_view: bool = False, maybe_equal: Numbers | None = None
    ) -> None:
        self.positions: Positions = positions.astype(np.uint32)
        self.shape = shape
        self.is_view = is_view
        self.may_be_negative = True
        self._maybe_equal = maybe_equal

    @property
    def is_unique(self) -> bool:
        """True if no position occurs twice."""
        if self._maybe_equal is not None:
            if not _are_unique(self._maybe_equal):
                return False
            self._maybe_equal = None
        return True


@dataclass(frozen=True, slots=True)
class Mask:
    """Elements where a mask is set.

    Attributes:
        mask: bool [vocab] for all rows, or [rows, vocab].
        is_one: True if the index removes the dimension of rows.
    """

    rows: Sequence[int]
    mask: torch.Tensor
    is_one: bool = False

    def cells(self, vocab_size: int) -> Cells | None:
        """Return the elements if there are few."""
        places = self.mask.numpy().reshape(-1).nonzero()[0]
        starts = _starts(self.rows, vocab_size)
        if self.mask.ndim == 2:
            own_rows, columns = np.divmod(places, vocab_size)
            positions = starts[own_rows] + columns
        else:
            positions = starts[:, None] + places
        if positions.size * _FEW_PLACES > len(self.rows) * vocab_size:
            return None
        shape = (len(places),) if self.is_one or self.mask.ndim == 2 else positions.shape
        return Cells(positions.reshape(-1), shape)


Selection: TypeAlias = Rows | Cells | Mask


class RecentSelections:
    """Selections of earlier calls, by the contents of their indices.

    A processor often edits the same tokens at every step, and `logits[:, ids] += bias` selects them twice. Finding a
    selection takes a fraction of the time of making it, and of searching it for equal positions.
    """

    def __init__(self) -> None:
        self._selections: dict[Hashable, Selection | None] = {}
        self._num_kept = 0
        self._tensors = _TensorContents(), _TensorContents()
        self._last: tuple[Hashable, Selection | None] = None, None

    def select(self, rows: range, is_one: bool, vocab_size: int, index: Any) -> Selection | None:
        """See `select`."""
        contents: tuple[Hashable, Hashable]
        if type(index) is not tuple:
            contents = _NO_ROWS, self._contents(1, index)
        elif len(index) == 2:
            contents = self._contents(0, index[0]), self._contents(1, index[1])
        else:
            contents = None, None
        if None in contents:
            return select(rows, is_one, vocab_size, index)
        key = rows, is_one, vocab_size, contents
        # Comparing the numbers of two indices takes less time than hashing those of one.
        last_key, last = self._last
        if key == last_key:
            return last
        try:
            selection = self._selections[key]
        except KeyError:
            selection = select(rows, is_one, vocab_size, index)
            if not self._keep(key, selection):
                return selection
        self._last = key, selection
        return selection

    def _keep(self, key: Hashable, selection: Selection | None) -> bool:
        """Keep a selection unless it is too large. Return whether it is kept."""
        size = max(_MIN_KEPT, selection.positions.size if isinstance(selection, Cells) else 0)
        if size > _MAX_KEPT:
            return False
        self._num_kept += size
        if self._num_kept > _MAX_KEPT:
            self._selections.clear()
            self._num_kept = size
        self._selections[key] = selection
        return True

    def _contents(self, place: int, part: Any) -> Hashable:
        """Return what distinguishes a part of an index; None if it is of another kind."""
        kind = type(part)
        if kind is torch.Tensor:
            return self._tensors[place].of(part)
        if kind is int or part is Ellipsis:
            return part  # type: ignore[no-any-return]
        if kind is slice and part == _COLON:
            return _ALL_ROWS
        if kind is np.ndarray:
            return part.tobytes() if part.dtype == np.int64 and part.ndim == 1 and part.size <= _MAX_RECENT else None
        is_known = (kind is list or kind is tuple) and len(part) <= _MAX_RECENT and set(map(type, part)) == {int}
        return tuple(part) if is_known else None


class _TensorContents:
    """The contents of indices that are tensors.

    Remembers the array of the last one, which takes longer to make than its contents to copy.
    """

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor | None, int, Numbers] = None, 0, np.empty(0, np.int64)

    def of(self, numbers: torch.Tensor) -> bytes | None:
        """Return the bytes of int64 [n]; None if it is another tensor, or a long one."""
        last, address, array = self._last
        is_last = numbers is last and numbers.data_ptr() == address and numbers.numel() == array.size
        if is_last and numbers.stride() == _ADJACENT:  # methods such as `resize_` change the layout of a tensor
            return array.tobytes()
        if numbers.dtype is not torch.int64 or numbers.ndim != 1 or not _is_plain(numbers):
            return None
        if numbers.numel() > _MAX_RECENT:
            return None
        array = numbers.numpy()
        if numbers.stride() == _ADJACENT:
            self._last = numbers, numbers.data_ptr(), array
        return array.tobytes()


def is_everything(index: Any) -> bool:
    """Return whether an index selects all elements, whatever the dimensions."""
    return index is Ellipsis or (type(index) is slice and index == _COLON)


def few_positions(rows: range, is_one: bool, vocab_size: int, index: Any) -> list[int] | None:
    """Return the positions of the few elements that an index selects by plain numbers; None if it is any other.

    Args:
        rows: see `select`.
        is_one: see `select`.
        vocab_size: see `select`.
        index: see `select`.
    """
    first: Any = 0
    if not is_one and type(index) is tuple and len(index) == 2:
        first, index = index
    elif not is_one or type(index) is tuple:
        return None
    columns = _few_columns(index, vocab_size)
    if columns is None:
        return None
    if type(first) is int:
        if not 0 <= first < len(rows):
            return None
        rows = rows[first : first + 1]
    elif not is_everything(first):
        return None
    if len(rows) * len(columns) > FEW:
        return None
    if len(columns) == 1:
        start = columns[0]
        return [*range(rows.start * vocab_size + start, rows.stop * vocab_size + start, rows.step * vocab_size)]
    return [row * vocab_size + column for row in rows for column in columns]


def _few_columns(part: Any, vocab_size: int) -> Sequence[int] | None:
    """Return a part of an index as a few numbers, none of which is negative; None if it is anything else."""
    kind = type(part)
    if kind is int:
        return (part,) if 0 <= part < vocab_size else None
    is_few = (kind is list or kind is tuple) and 0 < len(part) <= _FEW_NUMBERS and set(map(type, part)) == {int}
    return part if is_few and min(part) >= 0 and max(part) < vocab_size else None


def select(rows: Sequence[int], is_one: bool, vocab_size: int, index: Any) -> Selection | None:
    """Return what an index selects; None if that is not certain.

    Args:
        rows: the rows of the tensor that is indexed.
        is_one: True if it is one row, [vocab], and not [rows, vocab].
        vocab_size: number of columns.
        index: the author's index.
    """
    if type(index) is tuple:
        index = tuple(map(plain_index, index))
    elif type(index) is list and not _INTEGERS.issuperset(map(type, index)):
        return None  # PyTorch may treat it as a tuple
    else:
        index = plain_index(index)
    if type(index) is tuple:
        if len(index) == 2 and is_one and index[0] is Ellipsis:
            index = index[1:]
        elif len(index) == 2 and not is_one:
            return _select_two(rows, vocab_size, index[0], index[1])
        if len(index) != 1:
            return None
        (index,) = index
    if is_one:
        return _cells_of_row(rows[0], vocab_size, index)
    if _is_mask(index) and index.shape == (len(rows), vocab_size):
        return Mask(rows, index)
    return _select_rows(rows, index)


def _select_rows(rows: Sequence[int], index: Any) -> Rows | None:
    if type(index) is int:
        number = _normalized(index, len(rows))
        return None if number is None else Rows((rows[number],), is_view=True, is_one=True)
    if type(index) is slice or index is Ellipsis:
        part = index if type(index) is slice else slice(None)
        return Rows(rows[part], is_view=True) if _is_simple(part) else None
    numbers = _row_numbers(len(rows), index)
    if numbers is None:
        return None
    return Rows([rows[number] for number in numbers], is_view=False)


def _row_numbers(num_rows: int, index: Any) -> list[int] | None:
    """Return the rows that a list or a tensor of numbers or bools selects, each at most once."""
    if _is_mask(index) and index.shape == (num_rows,):
        numbers: list[int] = index.nonzero().squeeze(1).tolist()
        return numbers
    found = column_numbers(index, num_rows)
    if found is None:
        return None
    numbers = found.tolist()
    return numbers if len(set(numbers)) == len(numbers) else None


def _select_two(rows: Sequence[int], vocab_size: int, first: Any, second: Any) -> Selection | None:
    if type(second) is slice and second == slice(None):
        return _select_rows(rows, first)
    if type(first) is int:
        number = _normalized(first, len(rows))
        return None if number is None else _cells_of_row(rows[number], vocab_size, second)
    if type(first) is slice or first is Ellipsis:
        part = first if type(first) is slice else slice(None)
        return _cells_of_rows(rows[part], vocab_size, second) if _is_simple(part) else None
    if type(second) is int:
        column = _normalized(second, vocab_size)
        numbers = column_numbers(first, len(rows))
        if column is None or numbers is None:
            return None
        positions = _starts(rows, vocab_size)[numbers] + column
        return Cells(positions, positions.shape, maybe_equal=positions)
    return _select_pairs(rows, vocab_size, first, second)


def _select_pairs(rows: Sequence[int], vocab_size: int, first: Any, second: Any) -> Cells | None:
    """Select the elements at pairs of row and column, two lists or tensors that are broadcast."""
    row_numbers, columns = grid_numbers(first, len(rows)), grid_numbers(second, vocab_size)
    if row_numbers is None or columns is None:
        return None
    try:
        positions = _starts(rows, vocab_size)[row_numbers] + columns
    except ValueError:  # PyTorch raises its own error
        return None
    flat = positions.reshape(-1)
    return Cells(flat, positions.shape, maybe_equal=flat)


def _cells_of_row(row: int, vocab_size: int, index: Any) -> Selection | None:
    start = row * vocab_size
    if type(index) is int:
        column = _normalized(index, vocab_size)
        return None if column is None else Cells(np.array([start + column]), (), is_view=True)
    if type(index) is slice or index is Ellipsis:
        part = index if type(index) is slice else slice(None)
        if not _is_simple(part):
            return None
        if part == slice(None):
            return Rows((row,), is_view=True, is_one=True)
        selected = np.arange(*part.indices(vocab_size))
        return Cells(selected + start, selected.shape, is_view=True)
    if _is_mask(index):
        return Mask((row,), index, is_one=True) if index.shape == (vocab_size,) else None
    columns = column_numbers(index, vocab_size)
    if columns is None:
        return None
    return Cells(columns + start, columns.shape, maybe_equal=columns)


def _cells_of_rows(rows: Sequence[int], vocab_size: int, index: Any) -> Selection | None:
    if len(rows) == 0:
        return None
    if type(index) is int:
        column = _normalized(index, vocab_size)
        if column is None:
            return None
        starts = _starts(rows, vocab_size)
        return Cells(starts + column, starts.shape, is_view=True)
    if type(index) is slice:
        if not _is_simple(index):
            return None
        columns = np.arange(*index.indices(vocab_size))
    elif _is_mask(index):
        return Mask(rows, index) if index.shape == (vocab_size,) else None
    else:
        found = column_numbers(index, vocab_size)
        if found is None:
            return None
        columns = found
    if len(rows) == 1:
        positions = columns + rows[0] * vocab_size
    else:
        positions = (_starts(rows, vocab_size)[:, None] + columns).reshape(-1)
    return Cells(positions, (len(rows), len(columns)), is_view=type(index) is slice, maybe_equal=columns)


def cells_in_rows(rows: Sequence[int], vocab_size: int, index: torch.Tensor) -> Cells | None:
    """Return the elements with these column numbers, int64 [n] for one row or [rows, n]; no number is negative."""
    columns = index.numpy()
    if not _are_below(columns, vocab_size):
        return None
    starts = _starts(rows, vocab_size)
    positions = starts + columns if columns.ndim == 1 else starts[:, None] + columns
    flat = positions.reshape(-1)
    return Cells(flat, positions.shape, maybe_equal=flat)


def column_numbers(index: Any, size: int) -> Numbers | None:
    """Return the numbers below `size` in a list or a one-dimensional tensor of them; None if it is anything else."""
    numbers = grid_numbers(index, size)
    return numbers if numbers is not None and numbers.ndim == 1 else None


def grid_numbers(index: Any, size: int) -> Numbers | None:
    """Return the numbers below `size` in a list, or in a tensor or array of any shape; None if it is anything else."""
    if type(index) in (list, tuple, range):
        if not _INTEGERS.issuperset(map(type, index)):
            index = [each.item() if _is_number(each) else each for each in index]
            if not _INTEGERS.issuperset(map(type, index)):
                return None
        if 0 < len(index) <= FEW and min(index) >= 0 and max(index) < size:
            return np.array(index, np.int64)
        try:
            numbers = np.array(index, np.int64)
        except OverflowError:
            return None
    elif _is_plain(index) and index.dtype in _INT_TYPES:
        numbers = index.numpy()
        if numbers.dtype != np.int64:
            numbers = numbers.astype(np.int64)
    elif type(index) is np.ndarray and index.dtype in (np.int64, np.int32) and index.ndim > 0:
        numbers = index.astype(np.int64)
    else:
        return None
    if numbers.ndim == 0:
        return None
    if _are_below(numbers, size):
        return numbers
    numbers = np.where(numbers < 0, numbers + size, numbers)
    return numbers if _are_below(numbers, size) else None


def _are_below(numbers: Numbers, size: int) -> bool:
    """Return whether all numbers are below `size`, and none is negative."""
    return numbers.size == 0 or int(numbers.view(np.uint64).max()) < size  # a negative one is very large


def plain_index(index: Any) -> Any:
    """Return the number that stands for one of NumPy's or a tensor, which PyTorch treats in the same way."""
    if type(index) is np.int64 or _is_number(index):
        return int(index)
    return index


def _is_number(index: Any) -> bool:
    return type(index) is torch.Tensor and index.ndim == 0 and index.dtype in _INT_TYPES and _is_plain(index)


def _normalized(number: int, size: int) -> int | None:
    if -size <= number < size:
        return number % size
    return None


def _is_simple(part: slice) -> bool:
    """Return whether PyTorch accepts a slice: steps are positive, bounds are plain."""
    return all(bound is None or type(bound) is int for bound in (part.start, part.stop)) and (
        part.step is None or (type(part.step) is int and part.step > 0)
    )


def _is_plain(index: Any) -> bool:
    return type(index) is torch.Tensor and index.is_cpu and index.layout is torch.strided


def _is_mask(index: Any) -> bool:
    return type(index) is torch.Tensor and index.dtype is torch.bool and _is_plain(index)


def _starts(rows: Sequence[int], vocab_size: int) -> Numbers:
    return np.array(rows, np.int64) * vocab_size


def _are_unique(numbers: Numbers) -> bool:
    if len(numbers) < 2:
        return True
    if len(numbers) <= FEW:
        return len(set(numbers.tolist())) == len(numbers)
    if (numbers[1:] > numbers[:-1]).all():  # as `torch.unique` returns them
        return True
    if len(numbers) >= _MANY_NUMBERS:
        least = numbers.min()
        width = int(numbers.max() - least) + 1
        if width <= _MOST_PLACES_EACH * len(numbers):
            # A tenth of the time of sorting, as for a quarter of the vocabulary in random order, which watermarks use.
            is_there = np.zeros(width, bool)
            is_there[numbers - least] = True
            return int(np.count_nonzero(is_there)) == len(numbers)
    ordered = np.sort(numbers)
    return not bool((ordered[1:] == ordered[:-1]).any())
