"""Combines edits of different rows before they are sent: a processor often repeats the same few for each row.

This runs in the sandbox, while there are no logits yet. The server would do the same work while a step waits.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .edit_operations import (
    FEW,
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
    Restore,
    Save,
    WithPositions,
    same_positions,
)
from .merged_edits import edit_layers

_MIN_EDITS = 4
"""Logs with fewer edits are not combined any further."""
_SPARSE = 64
"""Positions are sorted by comparison if they are fewer than one of as many."""
_FLOAT = struct.Struct("=f")


def combine_edits(edits: GroupEdits, num_rows: int, vocab_size: int) -> GroupEdits:
    """Return fewer edits with the same effect on the logits, if possible.

    Registers that are never restored are left out, and the others get new numbers.
    """
    has_registers = Save in map(type, edits)
    if has_registers:
        edits = _with_arithmetic_in_place(edits)
    if len(edits) >= _MIN_EDITS:
        layers = [[edit for _, _, edit in layer] for layer in edit_layers([(range(num_rows), edits)], vocab_size)]
        keys = _register_keys(layers)
        edits = [edit for layer in layers for edit in _combined_layer(layer, keys)]
    return _renumbered(edits) if has_registers else edits


def _with_arithmetic_in_place(edits: GroupEdits) -> GroupEdits:
    """Replace each `Save` that is only restored by the next edit, at the same positions, by an `EditPositions`."""
    num_restored = Counter(edit.register for edit in edits if type(edit) is Restore)
    changed: list[Edit] = []
    for edit in edits:
        last = changed[-1] if changed else None
        if (
            type(edit) is Restore
            and type(last) is Save
            and last.register == edit.register
            and num_restored[edit.register] == 1
            and same_positions(last.positions, edit.positions)
        ):
            changed[-1] = EditPositions(edit.positions, edit.arithmetic)
        else:
            changed.append(edit)
    return changed


def _register_keys(layers: Sequence[Sequence[Edit]]) -> dict[int, Hashable]:
    """Return a key for each register. Registers with the same one are combined, in their order.

    They are saved in the same layer, and restored once, in the same layer and with the same arithmetic.
    """
    keys: dict[int, Hashable] = {}
    for number, layer in enumerate(layers):
        for edit in layer:
            if isinstance(edit, Save):
                keys[edit.register] = number
            elif isinstance(edit, Restore):
                saved = keys[edit.register]
                is_first = type(saved) is int
                keys[edit.register] = (saved, number, _arithmetic_key(edit)) if is_first else ("kept", edit.register)
    return keys


def _combined_layer(layer: Sequence[Edit], keys: dict[int, Hashable]) -> list[Edit]:
    similar: dict[Hashable, list[Any]] = {}
    for index, edit in enumerate(layer):
        key = keys[edit.register] if isinstance(edit, Save | Restore) else _key(edit)
        # An edit without a key is combined with no other, nor is one of a register that is restored more than once.
        is_single = key is None or (isinstance(edit, Restore) and key == ("kept", edit.register))
        similar.setdefault(index if is_single else (type(edit), key), []).append(edit)
    return [_combined(same) for same in similar.values()]


def _key(edit: Edit) -> Hashable:
    """Return a key that is equal for edits that can be combined; None if the edit cannot be."""
    if isinstance(edit, Put | Fill):
        return _operand_key(edit.value)
    if isinstance(edit, EditRows):
        return edit.operator, id(edit.operand) if isinstance(edit.operand, np.ndarray) else _operand_key(edit.operand)
    return _arithmetic_key(edit) if isinstance(edit, EditPositions) else None


def _operands(edit: EditPositions) -> list[Operand]:
    return [operand for _, operand in edit.arithmetic]


def _arithmetic_key(edit: Restore | EditPositions) -> Hashable:
    return tuple((operator, _operand_key(operand)) for operator, operand in edit.arithmetic)


def _operand_key(operand: Operand) -> Hashable:
    """Return the bits of a number, since NaN is not equal to itself, and zeros have signs; None for any array."""
    return None if isinstance(operand, np.ndarray) else _FLOAT.pack(operand)


def _combined(same: list[Any]) -> Edit:
    """Return one edit for several with the same key."""
    if len(same) > 1 and isinstance(same[0], Restore):
        same.sort(key=lambda edit: edit.register)  # as they are saved
    edit = same[0]
    if len(same) == 1:
        return edit  # type: ignore[no-any-return]
    if not isinstance(edit, WithPositions):
        return edit._replace(rows=_joined(each.rows for each in same))  # type: ignore[no-any-return]
    positions = _joined(each.positions for each in same)
    if isinstance(edit, Put | Save):
        return edit._replace(positions=positions)
    steps = zip(*(each.arithmetic for each in same), strict=True)
    arithmetic = tuple((step[0][0], _joined_operand([operand for _, operand in step])) for step in steps)
    return edit._replace(positions=positions, arithmetic=arithmetic)


def _joined_operand(operands: Sequence[Operand]) -> Operand:
    return _joined(operands) if isinstance(operands[0], np.ndarray) else operands[0]


def _joined(arrays: Iterable[Any]) -> Any:
    return np.concatenate(list(arrays))


def _renumbered(edits: GroupEdits) -> GroupEdits:
    """Leave out registers that are never restored, and number the others from 0."""
    restored = {edit.register for edit in edits if isinstance(edit, Restore)}
    numbers: dict[int, int] = {}
    renumbered: list[Edit] = []
    for edit in edits:
        if isinstance(edit, Save):
            if edit.register in restored:
                numbers[edit.register] = len(numbers)
                renumbered.append(Save(edit.positions, numbers[edit.register]))
        elif isinstance(edit, Restore):
            renumbered.append(edit._replace(register=numbers[edit.register]))
        else:
            renumbered.append(edit)
    return renumbered


def with_ascending_positions(edits: GroupEdits, vocab_size: int) -> GroupEdits:
    """Return edits with the same effect, whose positions and rows ascend, but for those of `Restore`.

    A number that is put at many positions becomes a mask.
    """
    orders: dict[int, npt.NDArray[np.int64]] = {}  # of the registers whose values get another order
    ordered: list[Edit] = []
    for edit in edits:
        if isinstance(edit, Put):
            ordered.append(_mask_of(edit, vocab_size) or Put(_ascending(edit.positions), edit.value))
            continue
        if isinstance(edit, EditPositions) and None not in map(_operand_key, _operands(edit)):
            ordered.append(EditPositions(_ascending(edit.positions), edit.arithmetic))
            continue
        if isinstance(edit, Restore):
            order = orders.get(edit.register)
        else:
            numbers = edit.positions if isinstance(edit, WithPositions) else edit.rows
            order = None if _ascends(numbers) else np.argsort(numbers)
        if isinstance(edit, Save) and order is not None:
            orders[edit.register] = order
        ordered.append(edit if order is None else _reordered(edit, order))
    return ordered


def _ascending(positions: Positions) -> Positions:
    """Return positions in ascending order; one that occurs twice may be left out once."""
    if _ascends(positions):
        return positions
    first, size = positions.min(), int(np.ptp(positions)) + 1
    if size > _SPARSE * len(positions):
        return np.sort(positions)
    is_named = np.zeros(size, np.bool_)  # a fraction of the time of a sort
    is_named[positions - first] = True
    ascending: Positions = np.flatnonzero(is_named).astype(positions.dtype) + first
    return ascending


def _ascends(numbers: Positions) -> bool:
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        return bool(listed == sorted(listed))
    return bool((numbers[:-1] <= numbers[1:]).all())


def _reordered(edit: Any, order: npt.NDArray[np.int64]) -> Any:
    if isinstance(edit, PutMask):
        return edit._replace(rows=edit.rows[order], bits=edit.bits[order] if len(edit.bits) > 1 else edit.bits)
    if not isinstance(edit, WithPositions):
        return edit._replace(rows=edit.rows[order])
    if isinstance(edit, Put | Save):
        return edit._replace(positions=edit.positions[order])
    steps = tuple(
        (operator, operand[order] if isinstance(operand, np.ndarray) else operand)
        for operator, operand in edit.arithmetic
    )
    return edit._replace(positions=edit.positions[order], arithmetic=steps)


def _mask_of(put: Put, vocab_size: int) -> PutMask | None:
    """Return an edit that puts a number, as a mask; None if that would touch more elements."""
    if POSITION_COST * len(put.positions) < vocab_size:
        return None
    first = int(put.positions.min()) // vocab_size
    num_rows = int(put.positions.max()) // vocab_size - first + 1
    if POSITION_COST * len(put.positions) < num_rows * vocab_size:
        return None
    mask = np.zeros(num_rows * vocab_size, np.bool_)
    mask[put.positions - put.positions.dtype.type(first * vocab_size)] = True
    rows = np.arange(first, first + num_rows, dtype=put.positions.dtype)
    return PutMask(rows, np.packbits(mask.reshape(num_rows, vocab_size), axis=1), put.value)
