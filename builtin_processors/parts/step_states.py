"""States that depend on the logits of each step, and so are only known on the device.

The host never reads them. They are rows of small tensors on the device of the logits; each step creates new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEPS_KEPT = 32
"""Number of tokens that can be removed. No engine drafts as many in a step."""


@dataclass(frozen=True)
class RowState:
    """A row of a step's states.

    Attributes:
        batch: float64 [rows of the step, state size]. Immutable.
        row: the row in `batch`.
    """

    batch: torch.Tensor
    row: int


class StepStates:
    """A sequence's states, by the number of output tokens at their step.

    Assumptions: a sequence has one step for each number of output tokens, and again after tokens were removed.

    Guarantees: `before` and `add` cost O(1), or O(removed tokens). If more than `STEPS_KEPT` tokens are removed, it
    continues from the oldest state kept.

    Args:
        initial: the state before the first step.
    """

    def __init__(self, initial: RowState) -> None:
        self._oldest = initial
        self._kept: deque[tuple[int, RowState]] = deque()

    def before(self, num_output_tokens: int) -> RowState:
        """Return the state before a step. Drops the states of removed tokens."""
        while self._kept and self._kept[-1][0] >= num_output_tokens:
            self._kept.pop()
        return self._kept[-1][1] if self._kept else self._oldest

    def after(self, num_output_tokens: int) -> RowState | None:
        """Return the state after the step with that many output tokens, if it was the last one; None if not."""
        return self._kept[-1][1] if self._kept and self._kept[-1][0] == num_output_tokens else None

    def add(self, num_output_tokens: int, state: RowState) -> None:
        """Add the state after a step."""
        self._kept.append((num_output_tokens, state))
        if len(self._kept) > STEPS_KEPT:
            _, self._oldest = self._kept.popleft()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepStates:
        """Return a copy that shares the states, which are immutable tensors on the device."""
        copied = StepStates(self._oldest)
        copied._kept = self._kept.copy()
        return copied


def as_batch(states: Sequence[RowState]) -> torch.Tensor:
    """Return the states as one tensor, float64 [rows, state size]. Read-only."""
    batch = states[0].batch
    if len(batch) == len(states) and all(state.batch is batch and state.row == i for i, state in enumerate(states)):
        return batch  # nearly always: the same rows as in the last step
    return torch.stack([state.batch[state.row] for state in states])
