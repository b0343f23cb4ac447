"""Arranges edits that are independent of each other in layers, so that few operations can apply or encode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .edit_operations import Edit, GroupEdits, Restore, Save

LayerPart: TypeAlias = tuple[int, Sequence[int], Edit]
"""Number of the call, its rows in the batch, and an edit."""


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
            touched = edit.touched(vocab_size) if len(edits) > 1 and len(rows) > 1 else slice(0, 1)
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
