"""Edits of some rows of a call, and what they do to one row whatever its logits are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import MAX_EDITED

from .edit_operations import (
    Edit,
    EditPositions,
    EditRows,
    Floats,
    GroupEdits,
    Operand,
    Positions,
    Put,
    PutMask,
    Restore,
    Save,
    WithPositions,
)
from .merged_edits import apply_edits

_MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_LOGIT = _MAX_FLOAT / MAX_EDITED
"""Logits are assumed not to be larger."""
_MAX_FACTOR = 2.0
"""Edits with larger factors are not judged."""

_Chosen = npt.NDArray[np.bool_]


def is_row_wise(edits: GroupEdits, vocab_size: int) -> bool:
    """Return whether no edit takes values from another row."""
    return all(np.array_equal(saved // vocab_size, restored // vocab_size) for saved, restored in _moved(edits))


def _moved(edits: GroupEdits) -> Iterator[tuple[Positions, Positions]]:
    """Yield the positions that values are taken from, and those that they are put at."""
    saved = {edit.register: edit.positions for edit in edits if isinstance(edit, Save)}
    return ((saved[edit.register], edit.positions) for edit in edits if isinstance(edit, Restore))


def select_rows(edits: GroupEdits, rows: Sequence[int], num_rows: int, vocab_size: int) -> GroupEdits:
    """Return the edits of some rows, numbered by their places among them.

    Args:
        edits: edits that are `is_row_wise`.
        rows: the rows.
        num_rows: rows of the call.
        vocab_size: width of the logits.
    """
    place = np.full(num_rows, -1, np.int64)
    place[list(rows)] = np.arange(len(rows))
    return list(_selected(edits, place, vocab_size))


def _selected(edits: GroupEdits, place: npt.NDArray[np.int64], vocab_size: int) -> Iterator[Edit]:
    for edit in edits:
        if isinstance(edit, WithPositions):
            numbers, token_ids = np.divmod(edit.positions.astype(np.int64), vocab_size)
            chosen = place[numbers] >= 0
            if not chosen.any():
                continue
            positions = place[numbers[chosen]] * vocab_size + token_ids[chosen]
            if isinstance(edit, Put | Save):
                yield edit._replace(positions=positions)
            else:
                steps = tuple((operator, _of(operand, chosen)) for operator, operand in edit.arithmetic)
                yield edit._replace(positions=positions, arithmetic=steps)
            continue
        chosen = place[edit.rows] >= 0
        if not chosen.any():
            continue
        rows = place[edit.rows[chosen]]
        if isinstance(edit, PutMask) and len(edit.bits) > 1:
            yield PutMask(rows, edit.bits[chosen], edit.value)
        else:
            yield edit._replace(rows=rows)


def _of(operand: Operand, chosen: _Chosen) -> Operand:
    return operand[chosen] if isinstance(operand, np.ndarray) else operand


def finite_tokens(edits: GroupEdits, vocab_size: int) -> tuple[_Chosen, _Chosen] | None:
    """Return the tokens whose logits edits leave finite: where they were finite, and where they were -inf before.

    Args:
        edits: the edits of one row.
        vocab_size: width of the logits.

    Returns:
        bool [vocab] each; None if some depend on the logits of other tokens, or become NaN or +inf.
    """
    if not _is_bounded(_steps(edits)) or not all(np.array_equal(*positions) for positions in _moved(edits)):
        return None
    found = []
    for value in (0.0, -np.inf):
        logits = torch.full((1, vocab_size), value)
        apply_edits(logits, [([0], edits)])
        row: Floats = logits[0].numpy()
        finite = np.isfinite(row)
        if not (finite | np.isneginf(row)).all():
            return None
        found.append(finite)
    return found[0], found[1]


def _steps(edits: GroupEdits) -> Iterator[tuple[str, Operand]]:
    """Yield the arithmetic of edits."""
    for edit in edits:
        if isinstance(edit, EditRows):
            yield edit.operator, edit.operand
        elif isinstance(edit, Restore | EditPositions):
            yield from edit.arithmetic


def _is_bounded(steps: Iterable[tuple[str, Operand]]) -> bool:
    """Return whether steps keep finite logits in the range of float32, except those that they make -inf."""
    largest = _MAX_LOGIT  # as if every step were for the same logit
    for operator, operand in steps:
        if operator in ("*", "/"):
            factor = _largest_factor(operator, operand)
            if not factor <= _MAX_FACTOR:  # also if it is NaN
                return False
            largest *= factor
        else:
            term = float(np.max(np.abs(np.where(np.isneginf(operand), 0.0, operand))))
            if not term < MAX_EDITED:
                return False
            largest += term
    return largest <= _MAX_FLOAT


def _largest_factor(operator: str, operand: Operand) -> float:
    """Return the largest factor of a multiplication or division, 1 or larger."""
    sizes = np.abs(operand)
    if operator == "*":
        return float(np.max(sizes, initial=1.0))
    smallest = float(np.min(sizes, initial=1.0))
    return 1 / smallest if smallest > 0 else math.inf
