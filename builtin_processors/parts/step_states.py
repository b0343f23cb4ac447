"""States that depend on the logits of each step, and so on what only the device knows.

The host never looks at them. They are rows of small tensors that stay where the logits are, and every step makes new
ones of the old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

STEPS_KEPT = 32
"""How many tokens can be taken back. No engine drafts as many in a step."""


@dataclass(frozen=True)
class RowState:
    """A row of a step's states.

    Attributes:
        batch: float64 [rows of the step, numbers of a state]. Never changed.
        row: its row there.
    """

    batch: torch.Tensor
    row: int


class StepStates:
    """One sequence's states, by the number of output tokens that the step saw that made them.

    Assumptions: a sequence has one step for each number of output tokens; after tokens were taken back, again.

    Guarantees: `before` and `add` cost O(1), or O(tokens taken back). Of more tokens taken back than `STEPS_KEPT`, it
    goes on from the oldest state that it has.

    Args:
        initial: the state before the first step.
    """

    def __init__(self, initial: RowState) -> None:
        self._oldest = initial
        self._kept: deque[tuple[int, RowState]] = deque()

    def before(self, num_output_tokens: int) -> RowState:
        """The state that a step starts from. Those of tokens that were taken back are dropped."""
        while self._kept and self._kept[-1][0] >= num_output_tokens:
            self._kept.pop()
        return self._kept[-1][1] if self._kept else self._oldest

    def add(self, num_output_tokens: int, state: RowState) -> None:
        """Keep the state that a step made."""
        self._kept.append((num_output_tokens, state))
        if len(self._kept) > STEPS_KEPT:
            _, self._oldest = self._kept.popleft()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepStates:
        """A copy that shares the states: they never change, and copying them would be work for the device."""
        copied = StepStates(self._oldest)
        copied._kept = self._kept.copy()
        return copied


def as_batch(states: Sequence[RowState]) -> torch.Tensor:
    """One state a row: float64 [rows, numbers of a state]. Not to be changed."""
    batch = states[0].batch
    if len(batch) == len(states) and all(state.batch is batch and state.row == i for i, state in enumerate(states)):
        return batch  # the same rows as in the step before, as nearly always
    return torch.stack([state.batch[state.row] for state in states])
