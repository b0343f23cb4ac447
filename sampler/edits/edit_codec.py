"""The binary form of edits, in which a sandbox sends them to the server.

Each edit is a header and its arrays, which are little-endian and padded to four bytes. Positions and rows ascend, which
takes the server little to check, and spares its caches; those of a restore are in the order of its register.

```
uint8 kind, uint8 detail, uint16 number, uint32 count, float32 value
uint32 [count]      positions or rows
…                   by kind
```

| kind | detail | number | value | arrays |
|---|---|---|---|---|
| put | | | the value | |
| fill | | | the value | |
| save | | register | | |
| restore | number of steps | register | | for each step a step header, and float32 [count] if it has an array |
| edit rows | operator | 1: vector | the operand | a vector |
| put rows | | 1: vector | | a vector |
| put mask | 1: one mask for each row | | the value | uint8 [1 or count, ceil(vocab / 8)] |
| edit positions | number of steps | | | as those of restore |

A vector, float32 [vocab], is sent once: a header with its slot, and its elements if the slot did not have them before.

Assumptions:
* The server does not trust the bytes.

Guarantees:
* `decode` accepts nothing that `apply_edits` could not apply to the rows of the call, and to no others.
* What is decoded is not larger than what the bounds of `EditLog` allow. The time to decode it is linear.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .edit_combination import combine_edits, with_ascending_positions
from .edit_operations import (
    ARITHMETIC,
    FEW,
    MAX_EDITS,
    MAX_EDITS_PER_ROW,
    MAX_TOUCHED,
    POSITION_COST,
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
    WithPositions,
)
from .logit_edits import NUM_RECENT_VECTORS, EditLog

NUM_SLOTS = NUM_RECENT_VECTORS
"""Vectors that the server keeps for a sandbox."""

_HEADER = struct.Struct("<BBHIf")
_STEP = struct.Struct("<BBHf")
_VECTOR = struct.Struct("<HH")
_NUMBERS, _FLOATS, _BYTES = np.dtype("<u4"), np.dtype("<f4"), np.dtype(np.uint8)
_PUT, _FILL, _SAVE, _RESTORE, _EDIT_ROWS, _PUT_ROWS, _PUT_MASK, _EDIT_POSITIONS = range(8)
_OPERATORS = tuple(ARITHMETIC)
_NUMBER_OF = {operator: number for number, operator in enumerate(_OPERATORS)}


class InvalidEdits(ValueError):
    """The bytes are no edits of the call."""


class VectorSender:
    """The vectors that the server has, as far as this sandbox knows. See `VectorStore`.

    Equal vectors are the same object, see `RecentVectors`.
    """

    def __init__(self) -> None:
        self._slots: list[Floats] = []
        self._next_slot = 0

    def encode(self, vector: Floats) -> bytes:
        """Return a vector's binary form, and remember that the server has it."""
        for slot, known in enumerate(self._slots):
            if known is vector:
                return _VECTOR.pack(slot, 0)
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_SLOTS
        self._slots[slot : slot + 1] = [vector]
        return _VECTOR.pack(slot, 1) + vector.tobytes()


class VectorStore:
    """The vectors of a sandbox, by slot. Every answer with edits must be decoded, in order.

    Args:
        vocab_size: length of a vector.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._slots: dict[int, Floats] = {}

    def put(self, slot: int, vector: Floats) -> None:
        """Keep a vector."""
        if slot >= NUM_SLOTS:
            raise InvalidEdits("no such slot")
        self._slots[slot] = vector

    def get(self, slot: int) -> Floats:
        """Return a vector."""
        if slot not in self._slots:
            raise InvalidEdits("an empty slot")
        return self._slots[slot]


def encode(log: EditLog, vectors: VectorSender) -> bytes:
    """Return the binary form of a log, with as few edits as its rows allow."""
    if log.is_empty:
        return b""
    combined = combine_edits(log.edits, log.num_rows, log.vocab_size)
    ordered = with_ascending_positions(combined, log.vocab_size)
    return b"".join(part for edit in ordered for part in _encoded(edit, vectors))


def _encoded(edit: Edit, vectors: VectorSender) -> list[bytes]:
    """Return the header of an edit, and its arrays."""
    named = edit.positions if isinstance(edit, WithPositions) else edit.rows
    count, numbers = len(named), named.astype(_NUMBERS).tobytes()
    match edit:
        case Put():
            return [_HEADER.pack(_PUT, 0, 0, count, edit.value), numbers]
        case Fill():
            return [_HEADER.pack(_FILL, 0, 0, count, edit.value), numbers]
        case Save():
            return [_HEADER.pack(_SAVE, 0, edit.register, count, 0.0), numbers]
        case Restore():
            header = _HEADER.pack(_RESTORE, len(edit.arithmetic), edit.register, count, 0.0)
            return [header, numbers, *_encoded_arithmetic(edit.arithmetic)]
        case EditPositions():
            header = _HEADER.pack(_EDIT_POSITIONS, len(edit.arithmetic), 0, count, 0.0)
            return [header, numbers, *_encoded_arithmetic(edit.arithmetic)]
        case EditRows(_, operator, operand) if isinstance(operand, np.ndarray):
            return [_HEADER.pack(_EDIT_ROWS, _NUMBER_OF[operator], 1, count, 0.0), numbers, vectors.encode(operand)]
        case EditRows():
            return [_HEADER.pack(_EDIT_ROWS, _NUMBER_OF[edit.operator], 0, count, edit.operand), numbers]
        case PutRows():
            return [_HEADER.pack(_PUT_ROWS, 0, 1, count, 0.0), numbers, vectors.encode(edit.values)]
        case PutMask():
            header = _HEADER.pack(_PUT_MASK, len(edit.bits) > 1, 0, count, edit.value)
            return [header, numbers, edit.bits.tobytes(), bytes(-edit.bits.size % 4)]


def _encoded_arithmetic(arithmetic: Sequence[tuple[str, Operand]]) -> list[bytes]:
    parts: list[bytes] = []
    for operator, operand in arithmetic:
        if isinstance(operand, np.ndarray):
            parts += _STEP.pack(_NUMBER_OF[operator], 1, 0, 0.0), operand.tobytes()
        else:
            parts.append(_STEP.pack(_NUMBER_OF[operator], 0, 0, operand))
    return parts


def decode(data: bytes | bytearray, num_rows: int, vocab_size: int, vectors: VectorStore) -> GroupEdits:
    """Decode the edits of a call.

    Args:
        data: what the sandbox sent. The arrays of the edits share the memory of a bytearray.
        num_rows: rows of the call.
        vocab_size: width of the logits.
        vectors: the vectors that this sandbox sent before.

    Raises:
        InvalidEdits: the bytes are malformed, name rows or tokens that the call does not have, or are too many.
    """
    return _Decoder(data, num_rows, vocab_size, vectors).edits()


class _Decoder:
    def __init__(self, data: bytes | bytearray, num_rows: int, vocab_size: int, vectors: VectorStore) -> None:
        # Tensors need arrays that can be written to.
        self._data = data if isinstance(data, bytearray) else bytearray(data)
        self._at = 0
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._vectors = vectors
        self._registers: list[int] = []
        self._edits_left = MAX_EDITS + MAX_EDITS_PER_ROW * num_rows
        self._touches_left = MAX_TOUCHED * num_rows * vocab_size

    def edits(self) -> GroupEdits:
        """Return all edits."""
        edits: list[Edit] = []
        while self._at < len(self._data):
            self._count()
            kind, detail, number, count, value = self._unpack(_HEADER)
            if kind >= len(_DECODERS) or count == 0:
                raise InvalidEdits("no such edit")
            edits.append(_DECODERS[kind](self, detail, number, count, value))
        return edits

    def _put(self, detail: int, number: int, count: int, value: float) -> Put:
        return Put(self._positions(count, may_repeat=True), value)

    def _fill(self, detail: int, number: int, count: int, value: float) -> Fill:
        return Fill(self._rows(count), value)

    def _save(self, detail: int, number: int, count: int, value: float) -> Save:
        if number != len(self._registers):
            raise InvalidEdits("not the next register")
        self._registers.append(count)
        return Save(self._positions(count, may_repeat=True), number)

    def _restore(self, detail: int, number: int, count: int, value: float) -> Restore:
        if number >= len(self._registers) or self._registers[number] != count:
            raise InvalidEdits("no such register")
        positions = self._any_positions(count)
        if not _is_ascending(positions):
            self._check_unique(positions)
        return Restore(positions, number, self._arithmetic(detail, count))

    def _edit_positions(self, detail: int, number: int, count: int, value: float) -> EditPositions:
        return EditPositions(self._positions(count), self._arithmetic(detail, count))

    def _arithmetic(self, num_steps: int, count: int) -> tuple[tuple[str, Operand], ...]:
        return tuple([self._step(count) for _ in range(num_steps)])

    def _step(self, count: int) -> tuple[str, Operand]:
        operator, is_array, _, value = self._unpack(_STEP)
        self._count()
        self._touch(count)
        return _operator(operator), self._floats(count) if is_array else value

    def _edit_rows(self, detail: int, number: int, count: int, value: float) -> EditRows:
        rows = self._rows(count)
        return EditRows(rows, _operator(detail), self._vector() if number else value)

    def _put_rows(self, detail: int, number: int, count: int, value: float) -> PutRows:
        rows = self._rows(count)
        return PutRows(rows, self._vector())

    def _put_mask(self, detail: int, number: int, count: int, value: float) -> PutMask:
        rows = self._rows(count)
        shape = count if detail else 1, -(-self._vocab_size // 8)
        size = shape[0] * shape[1]
        bits = self._array(_BYTES, size).reshape(shape)
        self._take(-size % 4)
        return PutMask(rows, bits, value)

    def _vector(self) -> Floats:
        slot, is_new = self._unpack(_VECTOR)
        if is_new:
            # A copy: the data would be kept as long as the vector.
            self._vectors.put(slot, self._floats(self._vocab_size).copy())
        return self._vectors.get(slot)

    def _positions(self, count: int, *, may_repeat: bool = False) -> Positions:
        """Return ascending positions, each of which occurs once unless it may repeat."""
        positions = self._any_positions(count)
        _check_ascending(positions, may_repeat=may_repeat)
        return positions

    def _any_positions(self, count: int) -> Positions:
        positions = self._array(_NUMBERS, count)
        self._touch(POSITION_COST * count)
        if _largest(positions) >= self._num_rows * self._vocab_size:
            raise InvalidEdits("a position outside the rows of the call")
        return positions.astype(np.int64)  # an index, which `apply_edits` would otherwise have to make of it

    def _rows(self, count: int) -> Positions:
        """Return ascending rows, each of which occurs once."""
        rows = self._array(_NUMBERS, count)
        self._touch(count * self._vocab_size)
        if _largest(rows) >= self._num_rows:
            raise InvalidEdits("a row that the call does not have")
        _check_ascending(rows)
        return rows

    def _check_unique(self, positions: Positions) -> None:
        """Refuse positions in any order of which one occurs twice. In linear time, unlike a sort."""
        is_used = np.zeros(self._num_rows * self._vocab_size, np.bool_)
        is_used[positions] = True
        if np.count_nonzero(is_used) < len(positions):
            raise InvalidEdits("a number occurs twice")

    def _floats(self, count: int) -> Floats:
        return self._array(_FLOATS, count)

    def _array(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        start = self._take(count * dtype.itemsize)
        return np.frombuffer(self._data, dtype, count, start)

    def _unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self._data, self._take(form.size))

    def _take(self, size: int) -> int:
        """Return where the next bytes begin, and skip them."""
        start = self._at
        self._at += size
        if self._at > len(self._data):
            raise InvalidEdits("too short")
        return start

    def _count(self) -> None:
        """Count an edit, or a step of arithmetic."""
        self._edits_left -= 1
        if self._edits_left < 0:
            raise InvalidEdits("too many edits")

    def _touch(self, count: int) -> None:
        self._touches_left -= count
        if self._touches_left < 0:
            raise InvalidEdits("too many elements")


_DECODERS: tuple[Callable[[_Decoder, int, int, int, float], Edit], ...] = (
    _Decoder._put,
    _Decoder._fill,
    _Decoder._save,
    _Decoder._restore,
    _Decoder._edit_rows,
    _Decoder._put_rows,
    _Decoder._put_mask,
    _Decoder._edit_positions,
)
"""By the kind of the edit."""


def _operator(number: int) -> str:
    if number >= len(_OPERATORS):
        raise InvalidEdits("no such operator")
    return _OPERATORS[number]


def _largest(numbers: Positions) -> int:
    return max(numbers.tolist()) if len(numbers) <= FEW else int(np.maximum.reduce(numbers))


def _check_ascending(numbers: Positions, *, may_repeat: bool = False) -> None:
    if not _is_ascending(numbers, may_repeat=may_repeat):
        raise InvalidEdits("a number that does not ascend")


def _is_ascending(numbers: Positions, *, may_repeat: bool = False) -> bool:
    if len(numbers) <= FEW:
        listed: list[int] = numbers.tolist()
        return listed == sorted(listed if may_repeat else set(listed))
    compare = np.less_equal if may_repeat else np.less
    return bool(compare(numbers[:-1], numbers[1:]).all())
