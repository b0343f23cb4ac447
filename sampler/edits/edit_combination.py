"""Combines edits of different rows before they are sent: a processor often repeats the same few for each row.

This runs in the sandbox, while there are no logits yet. The server would do the same work while a step waits.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .edit_operations import (
    POSITION_COST,
    Edit,
    EditPositions,
    EditRows,
    Fill,
    GroupEdits,
    Operand,
    Positions,
    Put,
    PutMask,
    PutRows,
    Restore,
    Save,
    same_positions,
)
from .merged_edits import edit_layers

_MIN_EDITS = 4
"""Logs with fewer edits are not combined any further."""
_SPARSE = 64
"""Positions are sorted by comparison if they are fewer than one of as many."""
_ARRAY = "array"
_FLOAT = struct.Struct("=f")


def combine_edits(edits: GroupEdits, num_rows: int, vocab_size: int) -> GroupEdits:
    """Return fewer edits with the same effect on the logits, if possible.

    Registers that are never restored are left out, and the others get new numbers.
    """
    if len(edits) > 1:
        edits = _with_arithmetic_in_place(edits)
    if len(edits) < _MIN_EDITS:
        return edits
    groups = [(range(num_rows), _with_joined_puts(edits))]
    layers = [[edit for _, _, edit in layer] for layer in edit_layers(groups, vocab_size)]
    registers = _Registers(layers)
    combined: list[Edit] = []
    for layer in layers:
        similar: dict[Hashable, list[Any]] = {}
        for index, edit in enumerate(layer):
            key = registers.key(edit) if isinstance(edit, Save | Restore) else _key(edit)
            similar.setdefault(index if key is None else key, []).append(edit)
        for same in similar.values():
            if type(same[0]) is Save:
                combined += registers.save(same)
            elif type(same[0]) is Restore:
                combined.append(registers.restore(same))
            else:
                combined.append(_combined(same))
    return combined


def with_ascending_positions(edits: GroupEdits, vocab_size: int) -> GroupEdits:
    """Return edits with the same effect, whose positions and rows ascend, but for those of `Restore`.

    A number that is put at many positions becomes a mask.
    """
    orders: dict[int, npt.NDArray[np.int64]] = {}  # of the registers whose values get another order
    ordered: list[Edit] = []
    for edit in edits:
        if isinstance(edit, Restore):
            order = orders.get(edit.register)
            ordered.append(edit if order is None else _reordered(edit, order))
            continue
        if isinstance(edit, Put | EditPositions) and not _has_array(edit):
            mask = _mask_of(edit, vocab_size) if isinstance(edit, Put) else None
            ordered.append(mask or edit._replace(positions=_ascending(edit.positions)))
            continue
        order = _order_of(edit.positions if isinstance(edit, Put | Save | EditPositions) else edit.rows)
        if isinstance(edit, Save) and order is not None:
            orders[edit.register] = order
        ordered.append(edit if order is None else _reordered(edit, order))
    return ordered


def _has_array(edit: Put | EditPositions) -> bool:
    operands = [edit.values] if isinstance(edit, Put) else [operand for _, operand in edit.arithmetic]
    return any(isinstance(operand, np.ndarray) for operand in operands)


def _ascending(positions: Positions) -> Positions:
    """Return positions in ascending order; one that occurs twice may be left out once."""
    if _order_is_ascending(positions):
        return positions
    first, size = positions.min(), int(np.ptp(positions)) + 1
    if size > _SPARSE * len(positions):
        return np.sort(positions)
    is_named = np.zeros(size, np.bool_)  # a fraction of the time of a sort
    is_named[positions - first] = True
    ascending: Positions = np.flatnonzero(is_named).astype(positions.dtype) + first
    return ascending


def _order_of(numbers: Positions) -> npt.NDArray[np.int64] | None:
    """Return the order in which numbers ascend; None if they do."""
    return None if _order_is_ascending(numbers) else np.argsort(numbers)


def _order_is_ascending(numbers: Positions) -> bool:
    return len(numbers) == 1 or bool((numbers[:-1] <= numbers[1:]).all())


def _reordered(edit: Any, order: npt.NDArray[np.int64]) -> Any:
    if isinstance(edit, PutMask):
        return PutMask(edit.rows[order], edit.bits[order] if len(edit.bits) > 1 else edit.bits, edit.value)
    if isinstance(edit, Fill | EditRows | PutRows):
        return edit._replace(rows=edit.rows[order])
    if isinstance(edit, Put):
        return Put(edit.positions[order], _in_order(edit.values, order))
    if isinstance(edit, Save):
        return Save(edit.positions[order], edit.register)
    steps = tuple((operator, _in_order(operand, order)) for operator, operand in edit.arithmetic)
    return edit._replace(positions=edit.positions[order], arithmetic=steps)


def _in_order(operand: Operand, order: npt.NDArray[np.int64]) -> Operand:
    return operand[order] if isinstance(operand, np.ndarray) else operand


def _mask_of(put: Put, vocab_size: int) -> PutMask | None:
    """Return an edit that puts a number, as a mask; None if that would touch more elements."""
    first = int(put.positions.min()) // vocab_size
    num_rows = int(put.positions.max()) // vocab_size - first + 1
    if POSITION_COST * len(put.positions) < num_rows * vocab_size:
        return None
    mask = np.zeros(num_rows * vocab_size, np.bool_)
    mask[put.positions - put.positions.dtype.type(first * vocab_size)] = True
    rows = np.arange(first, first + num_rows, dtype=put.positions.dtype)
    value = put.values
    assert not isinstance(value, np.ndarray)
    return PutMask(rows, np.packbits(mask.reshape(num_rows, vocab_size), axis=1), value)


def _with_arithmetic_in_place(edits: GroupEdits) -> GroupEdits:
    """Replace each `Save` that is only restored by the next edit, at the same positions, by an `EditPositions`."""
    if not any(type(edit) is Restore and type(last) is Save for last, edit in pairwise(edits)):
        return edits
    num_restored: dict[int, int] = {}
    for edit in edits:
        if type(edit) is Restore:
            num_restored[edit.register] = num_restored.get(edit.register, 0) + 1
    changed: list[Edit] = []
    numbers: dict[int, int] = {}  # of the registers that are left
    last: Edit | None = None
    for edit in edits:
        if type(edit) is Save:
            numbers[edit.register] = len(numbers)
            changed.append(edit if len(numbers) > edit.register else Save(edit.positions, numbers[edit.register]))
        elif type(edit) is not Restore:
            changed.append(edit)
        elif (
            type(last) is Save
            and last.register == edit.register
            and num_restored[edit.register] == 1
            and same_positions(last.positions, edit.positions)
        ):
            del numbers[edit.register]
            changed[-1] = EditPositions(edit.positions, edit.arithmetic)
        else:
            changed.append(Restore(edit.positions, numbers[edit.register], edit.arithmetic))
        last = edit
    return changed


def _with_joined_puts(edits: GroupEdits) -> GroupEdits:
    """Join each run of edits that put the same number."""
    if not any(type(first) is type(second) is Put for first, second in pairwise(edits)):
        return edits
    joined: list[Edit] = []
    for key, run in groupby(edits, lambda edit: _key(edit) if isinstance(edit, Put) else None):
        same = list(run)
        joined += same if key in (None, _ARRAY) else [_combined(same)]
    return joined


def _key(edit: Edit) -> Hashable:
    """Return a key that is equal for edits that can be combined; None if the edit cannot be."""
    if isinstance(edit, Put):
        return _operand_key(edit.values)
    if isinstance(edit, Fill):
        return _operand_key(edit.value)
    if isinstance(edit, EditRows):
        operand = edit.operand
        return edit.operator, id(operand) if isinstance(operand, np.ndarray) else _operand_key(operand)
    if isinstance(edit, PutRows):
        return (id(edit.values),)
    if isinstance(edit, EditPositions):
        return _arithmetic_key(edit)
    return None


def _combined(same: Sequence[Any]) -> Edit:
    """Return one edit for several with the same key."""
    edit = same[0]
    if len(same) == 1:
        return edit  # type: ignore[no-any-return]
    if isinstance(edit, Put):
        return Put(_joined(each.positions for each in same), _joined_operand([each.values for each in same]))
    if isinstance(edit, EditPositions):
        return EditPositions(_joined(each.positions for each in same), _joined_arithmetic(same))
    return edit._replace(rows=_joined(each.rows for each in same))  # type: ignore[no-any-return]


class _Registers:
    """Registers of the combined edits.

    Two are combined if each is restored once, in the same layer and with the same arithmetic.

    Args:
        layers: the edits.
    """

    def __init__(self, layers: Iterable[Sequence[Edit]]) -> None:
        self._keys: dict[int, Hashable] = {}  # of registers that are restored
        self._numbers: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._num_registers = 0
        for number, layer in enumerate(layers):
            for edit in layer:
                if isinstance(edit, Restore):
                    is_first = edit.register not in self._keys
                    self._keys[edit.register] = (number, _arithmetic_key(edit)) if is_first else None

    def key(self, edit: Save | Restore) -> Hashable:
        """Return a key that is equal for edits of a layer that can be combined; None if the edit cannot be."""
        key = self._keys.get(edit.register)
        return ("combined", self._numbers[edit.register]) if key is not None and isinstance(edit, Restore) else key

    def save(self, same: Sequence[Save]) -> list[Save]:
        """Return one edit for several with the same key; none if the register is not restored."""
        if same[0].register not in self._keys:
            return []
        number = self._num_registers
        self._num_registers += 1
        for place, edit in enumerate(same):
            self._numbers[edit.register], self._places[edit.register] = number, place
        return [Save(_joined(edit.positions for edit in same), number)]

    def restore(self, same: Sequence[Restore]) -> Restore:
        """Return one edit for several with the same key."""
        same = sorted(same, key=lambda edit: self._places[edit.register])
        positions = _joined(edit.positions for edit in same)
        return Restore(positions, self._numbers[same[0].register], _joined_arithmetic(same))


def _arithmetic_key(edit: Restore | EditPositions) -> Hashable:
    return tuple((operator, _operand_key(operand)) for operator, operand in edit.arithmetic)


def _operand_key(operand: Operand) -> Hashable:
    """Return the bits of a number, since NaN is not equal to itself, and zeros have signs."""
    return _ARRAY if isinstance(operand, np.ndarray) else _FLOAT.pack(operand)


def _joined_arithmetic(same: Sequence[Restore | EditPositions]) -> tuple[tuple[str, Operand], ...]:
    """Return the arithmetic of one edit for several with the same operators."""
    steps = zip(*(edit.arithmetic for edit in same), strict=True)
    return tuple((step[0][0], _joined_operand([operand for _, operand in step])) for step in steps)


def _joined_operand(operands: Sequence[Operand]) -> Operand:
    first = operands[0]
    return _joined(operands) if isinstance(first, np.ndarray) else first


def _joined(arrays: Iterable[Any]) -> Any:
    parts = list(arrays)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
