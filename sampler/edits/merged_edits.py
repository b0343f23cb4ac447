"""Applies the edits of many calls to the logits of a batch, with few tensor operations.

The calls have no row in common, so that only the order within each call matters. Their edits are arranged in layers of
one kind, and each layer is applied to all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.device_tensor import copies_to

from .edit_operations import (
    ARITHMETIC,
    FEW,
    Edit,
    EditPositions,
    EditRows,
    Fill,
    Floats,
    GroupEdits,
    Operand,
    Positions,
    Put,
    PutMask,
    PutRows,
    Restore,
    Save,
    same_number,
    touched_rows,
)

_Long: TypeAlias = npt.NDArray[np.int64]

LayerPart: TypeAlias = tuple[int, Sequence[int], Edit]
"""Number of the call, its rows in the batch, and an edit."""

SavedValues: TypeAlias = Floats | torch.Tensor
"""The values of a register, float32 [n]: an array if the logits are on the CPU."""

_IN_PLACE: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "+": torch.Tensor.add_,
    "-": torch.Tensor.sub_,
    "*": torch.Tensor.mul_,
    "/": torch.Tensor.div_,
}


def apply_edits(
    logits: torch.Tensor, groups: Sequence[tuple[Sequence[int], GroupEdits]]
) -> list[dict[int, SavedValues]]:
    """Apply the edits of several calls, in place.

    Args:
        logits: float32 [rows, vocab], contiguous.
        groups: for each call, the rows of `logits` that are its rows 0, 1, …; and its edits. No row is in two calls.

    Returns:
        The registers of each call, by number.
    """
    target = _Target(logits, len(groups))
    for layer in edit_layers(groups, target.vocab_size):
        target.apply(layer)
    return target.registers


def apply_separately(logits: torch.Tensor, groups: Sequence[tuple[Sequence[int], GroupEdits]]) -> dict[int, Exception]:
    """Apply the edits of several calls like `apply_edits`. Those that cannot be applied do not affect the other calls.

    Returns:
        The exceptions, by number of the call. Some edits of its rows may have been applied.
    """
    failed: dict[int, Exception] = {}
    target = _Target(logits, len(groups))
    for layer in _layers_of_most(groups, target.vocab_size, failed):
        # After a failure, a layer is applied again, part by part. So it must not have changed what it reads.
        may_repeat = not isinstance(layer[0][2], EditRows)
        for parts in [layer] if may_repeat else [[part] for part in layer]:
            _apply_most(target, [part for part in parts if part[0] not in failed], failed)
    return failed


def _layers_of_most(
    groups: Sequence[tuple[Sequence[int], GroupEdits]], vocab_size: int, failed: dict[int, Exception]
) -> list[list[LayerPart]]:
    """Return the layers of all calls; if that raises, of those for which it does not."""
    try:
        return edit_layers(groups, vocab_size)
    except Exception:  # noqa: BLE001  # boundary: engine thread
        layers: list[list[LayerPart]] = []
        for number, group in enumerate(groups):
            try:
                own = edit_layers([group], vocab_size)
            except Exception as error:  # noqa: BLE001  # boundary: engine thread
                failed[number] = error
            else:
                layers += [[(number, rows, edit) for _, rows, edit in layer] for layer in own]
        return layers


def _apply_most(target: _Target, layer: Sequence[LayerPart], failed: dict[int, Exception]) -> None:
    """Apply a layer; if that raises, its parts one by one."""
    try:
        if layer:
            target.apply(layer)
    except Exception as error:  # noqa: BLE001  # boundary: engine thread
        if len(layer) == 1:
            failed[layer[0][0]] = error
        else:
            for part in layer:
                _apply_most(target, [part], failed)


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
            touched = touched_rows(edit, vocab_size) if len(edits) > 1 and len(rows) > 1 else slice(0, 1)
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


class _Target:
    """The logits that layers are applied to, and the registers of the calls.

    Attributes:
        vocab_size: width of the logits.
        registers: for each call, the values that its edits saved, by register.
    """

    def __init__(self, logits: torch.Tensor, num_calls: int) -> None:
        self._logits = logits
        # For the few positions of an edit, NumPy takes a fraction of the time that PyTorch takes.
        self._array = logits.numpy() if logits.is_cpu else None
        self.vocab_size: int = logits.shape[-1] if self._array is None else self._array.shape[-1]
        self.registers: list[dict[int, SavedValues]] = [{} for _ in range(num_calls)]

    def apply(self, layer: Sequence[LayerPart]) -> None:
        """Apply a layer."""
        edit = layer[0][2]
        if isinstance(edit, Put):
            self._put(layer)
        elif isinstance(edit, Fill):
            self._fill(layer)
        elif isinstance(edit, EditPositions):
            self._edit_positions(layer)
        elif isinstance(edit, Save):
            self._save(layer)
        elif isinstance(edit, Restore):
            self._restore(layer)
        else:
            for _, rows, each in layer:
                self._edit_rows(rows, each)

    def _put(self, layer: Sequence[Any]) -> None:
        self._write(self._positions(layer), _joined_values(layer))

    def _fill(self, layer: Iterable[Any]) -> None:
        rows_of: dict[bytes, list[int]] = {}
        for _, rows, edit in layer:
            key = np.float32(edit.value).tobytes()  # NaN is not equal to itself
            rows_of.setdefault(key, []).extend(_chosen(rows, edit.rows))
        for key, filled in rows_of.items():
            value = float(np.frombuffer(key, np.float32)[0])
            self._rows(sorted(filled), partial(_filled, value))

    def _edit_positions(self, layer: Sequence[Any]) -> None:
        positions = self._positions(layer)
        values = self._read(positions)
        alike = layer[:1] if _have_same_arithmetic(layer) else layer
        parts = [values] if len(alike) == 1 else _split(values, layer)
        self._write(positions, self._calculated(parts, alike))

    def _save(self, layer: Sequence[Any]) -> None:
        values = self._read(self._positions(layer))
        for (number, _, edit), part in zip(layer, _split(values, layer), strict=True):
            self.registers[number][edit.register] = part

    def _restore(self, layer: Sequence[Any]) -> None:
        parts = [self.registers[number][edit.register] for number, _, edit in layer]
        self._write(self._positions(layer), self._calculated(parts, layer))

    def _calculated(self, parts: Iterable[SavedValues], layer: Sequence[Any]) -> SavedValues:
        """Return values after the arithmetic of the edits of a layer, one after the other."""
        with np.errstate(all="ignore"):  # as PyTorch, without a warning
            results = [self._result(values, edit) for values, (_, _, edit) in zip(parts, layer, strict=True)]
        if len(results) == 1:
            return results[0]
        return torch.cat(results) if self._array is None else np.concatenate(results)  # type: ignore[arg-type]

    def _result(self, values: SavedValues, edit: Restore | EditPositions) -> SavedValues:
        for each, operand in edit.arithmetic:
            values = ARITHMETIC[each](values, operand if self._array is not None else self._operand(operand))
        return values

    def _edit_rows(self, rows: Sequence[int], edit: Edit) -> None:
        assert isinstance(edit, EditRows | PutRows | PutMask)
        chosen = _chosen(rows, edit.rows)
        if isinstance(edit, EditRows):
            operand = self._operand(edit.operand)
            operation = _IN_PLACE[edit.operator]
            self._rows(chosen, lambda part, _: operation(part, operand))
        elif isinstance(edit, PutRows):
            values = self._to_device(edit.values)
            self._rows(chosen, lambda part, _: part.copy_(values))
        elif self._array is not None:
            kept, put = (bits.expand(len(chosen), -1) for bits in _mask_bits(edit, self.vocab_size))
            self._rows(chosen, lambda part, places: _put_bits(part, kept[places], put[places]))
        else:
            masks = self._mask(edit.bits).expand(len(chosen), -1)
            value = edit.value
            self._rows(chosen, lambda part, places: part.masked_fill_(masks[places], value))

    def _rows(self, rows: Sequence[int], change: Callable[[torch.Tensor, slice], torch.Tensor]) -> None:
        """Change some rows in place.

        Args:
            rows: the rows of the batch.
            change: takes some of these rows, and their places among them; changes them in place and returns them.
        """
        runs = list(_runs(rows))
        if len(runs) == 1 or self._array is not None:
            for places in runs:
                first = rows[places.start]
                change(self._logits[first : first + places.stop - places.start], places)
            return
        # Few kernels count for more than copies on a GPU.
        index = self._to_device(np.array(rows, np.int64))
        self._logits.index_copy_(0, index, change(self._logits.index_select(0, index), slice(0, len(rows))))

    def _mask(self, bits: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Unpack `numpy.packbits` on the device, bool [rows, vocab]."""
        packed = self._to_device(bits)
        weights = self._to_device(np.array([128, 64, 32, 16, 8, 4, 2, 1], np.uint8))
        return (packed[:, :, None] & weights).ne(0).view(len(bits), -1)[:, : self.vocab_size]

    def _operand(self, operand: Operand) -> torch.Tensor | float:
        if isinstance(operand, np.ndarray):
            return self._to_device(operand)
        # PyTorch divides by a number on a GPU by multiplying with its reciprocal, which rounds twice.
        return operand if self._array is not None else self._to_device(np.array([operand], np.float32))

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return copies_to(self._logits.device)(array)

    def _positions(self, layer: Sequence[Any]) -> _Long:
        """Return the positions in the batch of those that edits name in the rows of their calls."""
        if len(layer) > 1 and sum(len(edit.positions) for _, _, edit in layer) <= FEW:
            return np.array([*self._few_positions(layer)], np.int64)
        positions: _Long = _joined([edit.positions for _, _, edit in layer]).astype(np.int64, copy=False)
        if all(isinstance(rows, range) for _, rows, _ in layer):
            starts = [rows[0] * self.vocab_size for _, rows, _ in layer]
            return positions + _repeated(starts, layer) if any(starts) else positions
        all_rows = np.array([row for _, rows, _ in layer for row in rows], np.int64)
        firsts = accumulate((len(rows) for _, rows, _ in layer[:-1]), initial=0)
        numbers, token_ids = np.divmod(positions, self.vocab_size)
        numbers += _repeated([*firsts], layer)
        return all_rows[numbers] * self.vocab_size + token_ids

    def _few_positions(self, layer: Sequence[Any]) -> Iterator[int]:
        for _, rows, edit in layer:
            for position in edit.positions.tolist():
                number, token_id = divmod(position, self.vocab_size)
                yield rows[number] * self.vocab_size + token_id

    def _read(self, positions: _Long) -> SavedValues:
        """Return a copy of the values at positions, float32 [n]."""
        if self._array is not None:
            values: Floats = self._array.take(positions)
            return values
        return self._logits.view(-1).index_select(0, self._to_device(positions))

    def _write(self, positions: _Long, values: Operand | torch.Tensor) -> None:
        """Put a number, or float32 [n], at positions."""
        if self._array is not None:
            self._array.put(positions, values)
        elif isinstance(values, np.ndarray | torch.Tensor):
            spread = self._to_device(values) if isinstance(values, np.ndarray) else values
            self._logits.view(-1).scatter_(0, self._to_device(positions), spread)
        else:
            self._logits.view(-1).index_fill_(0, self._to_device(positions), values)


def _repeated(numbers: Sequence[int], layer: Sequence[Any]) -> _Long | int:
    """Return a number for each edit of a layer, as many times as it has positions; one number for one edit."""
    if len(layer) == 1:
        return numbers[0]
    return np.repeat(np.array(numbers, np.int64), [len(edit.positions) for _, _, edit in layer])


def _split(values: SavedValues, layer: Sequence[Any]) -> list[SavedValues]:
    """Return the values of each edit of a layer."""
    ends = [*accumulate(len(edit.positions) for _, _, edit in layer)]
    return [values[start:end] for start, end in pairwise((0, *ends))]


def _have_same_arithmetic(layer: Sequence[Any]) -> bool:
    """Return whether all edits of a layer do the same calculation with numbers."""
    first = layer[0][2].arithmetic
    return all(
        len(edit.arithmetic) == len(first)
        and all(
            operator == other and same_number(operand, number)
            for (operator, operand), (other, number) in zip(edit.arithmetic, first, strict=True)
        )
        for _, _, edit in layer
    )


def _joined_values(layer: Sequence[Any]) -> Operand:
    """Return the values that a layer puts: one number if all its edits put that."""
    first: float = layer[0][2].value
    if len(layer) == 1 or all(same_number(edit.value, first) for _, _, edit in layer):
        return first
    values: Floats = np.repeat(
        np.array([edit.value for _, _, edit in layer], np.float32), [len(edit.positions) for _, _, edit in layer]
    )
    return values


def _chosen(rows: Sequence[int], numbers: Positions) -> list[int]:
    """Return the rows of the batch with these numbers in the call."""
    return [rows[number] for number in numbers.tolist()]


def _runs(rows: Sequence[int]) -> Iterator[slice]:
    """Yield the places of rows that follow one another."""
    start = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield slice(start, place)
            start = place


def _filled(value: float, part: torch.Tensor, _: slice) -> torch.Tensor:
    return part.fill_(value)


def _mask_bits(edit: PutMask, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of logits that a mask keeps, and those that it sets, int32 [1 or rows, vocab]."""
    kept = np.unpackbits(edit.bits, axis=1, count=vocab_size).astype(np.int32)
    kept -= 1  # all ones where the mask is not set
    put = ~kept
    put &= np.float32(edit.value).view(np.int32)
    return torch.from_numpy(kept), torch.from_numpy(put)


def _put_bits(part: torch.Tensor, kept: torch.Tensor, put: torch.Tensor) -> torch.Tensor:
    """Set bits of float32. On a CPU this takes a tenth of the time of `masked_fill_`."""
    part.view(torch.int32).bitwise_and_(kept).bitwise_or_(put)
    return part


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
