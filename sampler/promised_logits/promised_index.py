"""Indices of promised logits: what an author's index selects, as PyTorch would select it.

None stands for an index of another form: PyTorch then indexes the real logits, and raises its own errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.edits.edit_operations import FEW, AnyPositions

from .promised_operands import is_plain

Numbers: TypeAlias = npt.NDArray[np.int64]

_ALL = slice(None)


class Rows(NamedTuple):
    """Whole rows, of which PyTorch returns a view.

    Attributes:
        rows: row numbers.
        is_one: True if the index removes the dimension of rows.
    """

    rows: range
    is_one: bool


class Cells(NamedTuple):
    """Some elements.

    Attributes:
        positions: their positions: a list of a few, or int64 [n].
        shape: shape of the result; its elements are the positions in order.
        numbers: numbers of which one occurs twice if a position does.
        is_view: True if PyTorch returns a view of them.
    """

    positions: AnyPositions
    shape: tuple[int, ...]
    numbers: AnyPositions
    is_view: bool = False

    @property
    def are_distinct(self) -> bool:
        """True if no position occurs twice."""
        numbers = self.numbers
        if len(numbers) <= FEW:
            return len(set(numbers)) == len(numbers)
        is_named = np.zeros(int(np.max(numbers)) + 1, np.bool_)  # a fraction of the time of a sort
        is_named[numbers] = True
        return int(np.count_nonzero(is_named)) == len(numbers)


class Mask(NamedTuple):
    """Elements where a mask is set.

    Attributes:
        rows: see `Rows`.
        mask: bool [vocab] for all rows, or [rows, vocab].
        is_one: see `Rows`.
    """

    rows: range
    mask: torch.Tensor
    is_one: bool

    def cells(self, vocab_size: int) -> Cells:
        """Return the elements."""
        starts = np.array(self.rows, np.int64) * vocab_size
        (places,) = self.mask.numpy().reshape(-1).nonzero()  # a fraction of the time in two dimensions
        if self.mask.ndim == 2:
            own_rows, columns = np.divmod(places, vocab_size)
            return _cells(starts[own_rows] + columns)
        grid = starts[:, None] + places
        return _cells(grid[0] if self.is_one else grid)


Selection: TypeAlias = Rows | Cells | Mask


def select(rows: range, is_one: bool, vocab_size: int, index: Any) -> Selection | None:
    """Return what an index selects; None if it is of another form, or selects what is not there.

    Args:
        rows: the rows of the tensor that is indexed.
        is_one: True if it is one row, [vocab], and not [rows, vocab].
        vocab_size: number of columns.
        index: the author's index.
    """
    first: Any
    if is_one:
        # PyTorch may treat a list of anything else as a tuple.
        if type(index) is tuple or (type(index) is list and not {int}.issuperset(map(type, index))):
            return None
        first, second = 0, index
    elif type(index) is tuple:
        if len(index) != 2 or index[0] is index[1] is Ellipsis:
            return None
        first, second = index
    elif is_plain(index, torch.bool) and index.shape == (len(rows), vocab_size):
        return Mask(rows, index, is_one=False)
    else:
        first, second = index, _ALL
    if type(first) is int:
        return _in_rows(rows[first : first + 1 or None], True, vocab_size, second) if _is_in(first, len(rows)) else None
    if is_everything(first) or _is_simple(first):
        return _in_rows(rows if first is Ellipsis else rows[first], False, vocab_size, second)
    row_numbers, columns = _numbers(first, len(rows)), _numbers(second, vocab_size)
    if row_numbers is None or columns is None or is_everything(second) or type(second) is slice:
        return None
    try:
        return _cells(np.array(rows, np.int64)[row_numbers] * vocab_size + np.asarray(columns, np.int64))
    except ValueError:  # they cannot be broadcast
        return None


def _in_rows(rows: range, is_one: bool, vocab_size: int, index: Any) -> Selection | None:
    """Return what an index selects in each of some rows."""
    if is_everything(index):
        return Rows(rows, is_one)
    if is_plain(index, torch.bool):
        return Mask(rows, index, is_one) if index.shape == (vocab_size,) else None
    columns = _numbers(index, vocab_size)
    if columns is None or (isinstance(columns, np.ndarray) and columns.ndim > 1):
        return None
    positions: AnyPositions
    if isinstance(columns, list) and len(rows) * len(columns) <= FEW:
        positions = [row * vocab_size + column for row in rows for column in columns]
    else:
        grid = np.array(rows, np.int64)[:, None] * vocab_size + np.asarray(columns, np.int64)
        positions = grid.reshape(-1)
    own_shape = () if type(index) is int else (len(columns),)
    shape = own_shape if is_one else (len(rows), *own_shape)
    return Cells(positions, shape, columns, is_view=type(index) in (int, slice))


def _cells(positions: Numbers) -> Cells:
    flat = positions.reshape(-1)
    return Cells(flat, positions.shape, flat)


def is_everything(index: Any) -> bool:
    """Return whether an index selects all elements, whatever the dimensions."""
    return index is Ellipsis or (type(index) is slice and index == _ALL)


def _numbers(index: Any, size: int) -> list[int] | Numbers | None:
    """Return the numbers below `size` that an index selects in one dimension. A few are a list."""
    kind = type(index)
    if kind is slice:
        return np.arange(*index.indices(size)) if _is_simple(index) else None
    if kind is int:
        index = [index]
    elif kind is list or kind is tuple:
        if not {int}.issuperset(map(type, index)):
            if not all(type(each) is int or _is_number(each) for each in index):
                return None
            index = [*map(int, index)]
    elif is_plain(index, torch.int64) and index.ndim > 0:
        # For a few numbers, making an array takes longer than everything else here.
        index = index.tolist() if index.ndim == 1 and index.numel() <= FEW else index.numpy()
    elif kind is not np.ndarray or index.dtype != np.int64 or index.ndim == 0:
        return None
    if type(index) is not np.ndarray:
        if len(index) <= FEW:
            return _few_numbers(index, size)
        try:
            index = np.array(index, np.int64)
        except OverflowError:
            return None
    numbers: Numbers = index
    if _are_below(numbers, size):
        return numbers
    numbers = np.where(numbers < 0, numbers + size, numbers)
    return numbers if _are_below(numbers, size) else None


def _few_numbers(index: Sequence[int], size: int) -> list[int] | None:
    if not index or 0 <= min(index) <= max(index) < size:
        return list(index)
    return [number % size for number in index] if -size <= min(index) <= max(index) < size else None


def _are_below(numbers: Numbers, size: int) -> bool:
    """Return whether all numbers are below `size`, and none is negative."""
    return numbers.size == 0 or int(numbers.view(np.uint64).max()) < size  # a negative one is very large


def _is_in(number: int, size: int) -> bool:
    return -size <= number < size


def _is_number(value: Any) -> bool:
    return is_plain(value, torch.int64) and value.ndim == 0


def _is_simple(part: Any) -> bool:
    """Return whether this is a slice that PyTorch accepts: steps are positive, bounds are plain."""
    return (
        type(part) is slice
        and all(bound is None or type(bound) is int for bound in (part.start, part.stop))
        and (part.step is None or (type(part.step) is int and part.step > 0))
    )
