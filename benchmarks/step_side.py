"""One side of a benchmark of processor steps: each row gains a token between two steps."""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass

from comparison import seconds_of

TURN_SECONDS = 0.004
"""Duration of a turn, unless one step takes longer."""


@dataclass
class StepSide:
    """Side of a benchmark.

    Attributes:
        step: the timed call.
        outputs: outputs of the rows, which grow by a token before each step.
        calls: number of steps in a turn.
    """

    step: Callable[[], object]
    outputs: Sequence[MutableSequence[int]]
    calls: int = 3

    def turn(self) -> float:
        """Run a turn and return the microseconds per step."""
        return 1e6 * seconds_of(self.step, self.calls, self._next_tokens)

    def choose_calls(self) -> None:
        """Set the number of steps so that a turn lasts `TURN_SECONDS`, or a single step if that is longer."""
        self.step()
        self.calls = min(100, max(1, round(1e6 * TURN_SECONDS / self.turn())))

    def _next_tokens(self) -> None:
        # Created now, like sampled tokens in an engine: older objects would not be in any cache.
        for output in self.outputs:
            output.append(random.randrange(1000, 100_000))
