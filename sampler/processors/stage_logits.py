"""The batch's logits while the groups of a stage edit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from logitship.sampler.edits.edit_operations import GroupEdits
from logitship.sampler.edits.merged_edits import apply_edits

from .executor import CollectEdits
from .processor_groups import GroupStage, ProcessorGroup


class StageLogits:
    """The rows of each group of a stage, and the edits that its calls recorded.

    Rows are taken when they are needed: a call that recorded edits needs none.

    Args:
        stage: the groups.
        logits: float32 [rows of the batch, vocab].
        observe: called with the edits of each call.
    """

    def __init__(
        self, stage: GroupStage, logits: torch.Tensor, observe: Callable[[ProcessorGroup, GroupEdits], None]
    ) -> None:
        self._stage = stage
        self._observe = observe
        self._logits = logits
        self._rows: dict[ProcessorGroup, torch.Tensor] = {}
        self._edits: list[tuple[Sequence[int], GroupEdits]] = []
        self._edited: list[ProcessorGroup] = []

    def rows_of(self, group: ProcessorGroup) -> torch.Tensor:
        """Return the rows of a group, float32 [rows, vocab]: a view if they are adjacent, else a copy."""
        if group not in self._rows:
            self._rows |= self._stage.rows_of(self._logits, group)
        return self._rows[group]

    def collector_of(self, group: ProcessorGroup) -> CollectEdits:
        """Return what takes the edits of a group, see `Run.finish`."""

        def collect(places: Sequence[int], edits: GroupEdits) -> None:
            self._observe(group, edits)
            self._edited.append(group)
            self._edits.append((group.batch_rows(places), edits))

        return collect

    def apply_edits(self) -> None:
        """Apply all edits to the batch's logits at once."""
        if self._edits:
            apply_edits(self._logits, self._edits)
        for group in self._edited:
            if not group.is_adjacent:
                self._rows.pop(group, None)  # a copy from before

    def write_back(self, group: ProcessorGroup) -> None:
        """Write the rows of a group to the batch's logits, if they are a copy."""
        if not group.is_adjacent and group in self._rows:
            self._logits[group.rows] = self._rows[group]
