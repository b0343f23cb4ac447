"""How long a decoding step takes, with and without drafts: learned from the steps themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Factor:
    """Of the steps of one kind: an exponential mean, and the number of the step that it was last learned from."""

    mean: float
    last_step: int


class ServingCost:
    """Corrects the time of a forward pass by what whole steps took.

    A pass that was timed alone, on one sequence, says how the time grows with the number of tokens. A step also draws
    tokens, calls processors and delivers; with drafts it draws several times, and its sequences have different numbers
    of tokens. So there is a factor for each size of the batch and each number of drafts (0, 1, 2 to 3, 4 to 7, ...):
    the exponential mean of the time that such steps took over that of a pass. What is not known yet is taken to be like
    what stands next to it.

    Args:
        forward_cost: number of tokens → time of a forward pass.
    """

    _WEIGHT = 1 / 16
    _MOST_WEIGHT = 1 / 4
    """Of a step whose like there has not been for long: much else may have changed since."""
    _OUTLIER = 2.0
    """A step that took so many times as long as usual counts as this: something else had the machine."""
    _FORGET = 1 / 64
    """Of what drafts cost more, goes with each step without: what was costly once is tried again."""

    def __init__(self, forward_cost: Callable[[int], float]) -> None:
        self._forward_cost = forward_cost
        self._num_steps = 0
        self._factors: defaultdict[int, dict[int, _Factor]] = defaultdict(dict)
        """By size of the batch and by number of drafts."""

    def __call__(self, num_rows: int, num_drafts: int) -> float:
        """The time that a step of so many sequences is expected to take, if so many tokens are drafted for them."""
        factors = self._factors[num_rows.bit_length()]
        wanted = num_drafts.bit_length()
        alike = [known for known in factors if bool(known) == bool(wanted)] or [*factors]
        nearest = min(alike, key=lambda known: abs(known - wanted), default=None)
        factor = 1.0 if nearest is None else factors[nearest].mean
        return factor * self._forward_cost(num_rows + num_drafts)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Learn from a step without prompts."""
        self._num_steps += 1
        factors = self._factors[num_rows.bit_length()]
        found = seconds / self._forward_cost(num_rows + num_drafts)
        factor = factors.setdefault(num_drafts.bit_length(), _Factor(found, self._num_steps))
        age = self._num_steps - factor.last_step
        weight = min(1 - (1 - self._WEIGHT) ** age, self._MOST_WEIGHT)
        factor.mean += weight * (min(found, self._OUTLIER * factor.mean) - factor.mean)
        factor.last_step = self._num_steps
        if not num_drafts:
            for drafted in factors.values():
                drafted.mean -= self._FORGET * max(0.0, drafted.mean - factor.mean)
