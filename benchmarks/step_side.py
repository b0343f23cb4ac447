"""Steps of processors, one side's: between two of them, each row gains a token."""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass

from comparison import seconds_of

TURN_SECONDS = 0.004
"""How long a side's turn lasts, if a step is shorter."""


@dataclass
class StepSide:
    """One side.

    Attributes:
        step: what is timed.
        outputs: of the rows, which grow by a token before each step.
        calls: how many steps a turn has.
    """

    step: Callable[[], object]
    outputs: Sequence[MutableSequence[int]]
    calls: int = 3

    def turn(self) -> float:
        """Microseconds of a step."""
        return 1e6 * seconds_of(self.step, self.calls, self._next_tokens)

    def choose_calls(self) -> None:
        """So many steps a turn that it lasts `TURN_SECONDS`, if one is not longer."""
        self.step()
        self.calls = min(100, max(1, round(1e6 * TURN_SECONDS / self.turn())))

    def _next_tokens(self) -> None:
        # Made now, as those that an engine draws: objects of long ago would lie in memory that no cache holds.
        for output in self.outputs:
            output.append(random.randrange(1000, 100_000))
