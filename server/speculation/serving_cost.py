"""Time of a decoding step, with and without drafts, learned from the steps themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Factor:
    """Exponential mean for steps of one kind, and the number of the last such step."""

    mean: float
    last_step: int


class ServingCost:
    """Corrects the time of a forward pass by the measured time of whole steps.

    A pass measured alone, on one sequence, shows how the time grows with the number of tokens. A step also samples
    tokens, calls processors and delivers output; with drafts it samples several times, and its sequences have different
    numbers of tokens. So there is a factor for each size of the batch and each number of drafts (0, 1, 2 to 3, 4 to 7,
    ...): the exponential mean of the time of such steps over that of a pass. An unknown factor is that of the nearest
    known one.

    Args:
        forward_cost: number of tokens → time of a forward pass.
    """

    _WEIGHT = 1 / 16
    _MAX_WEIGHT = 1 / 4
    """Largest weight of a step. Steps of a kind not seen for long get more weight: the load may have changed."""
    _OUTLIER = 2.0
    """Largest ratio of a step's time to the usual time; slower steps are clipped: something else used the machine."""
    _DECAY = 1 / 64
    """Share of the extra cost of drafts that decays with each step without drafts, so that they are tried again."""

    def __init__(self, forward_cost: Callable[[int], float]) -> None:
        self._forward_cost = forward_cost
        self._num_steps = 0
        self._factors: defaultdict[int, dict[int, _Factor]] = defaultdict(dict)
        """Factors by size of the batch and by number of drafts, both as bit lengths."""

    def __call__(self, num_rows: int, num_drafts: int) -> float:
        """Return the expected time of a step with `num_rows` sequences and `num_drafts` drafted tokens."""
        factors = self._factors[num_rows.bit_length()]
        wanted = num_drafts.bit_length()
        alike = [known for known in factors if bool(known) == bool(wanted)] or [*factors]
        nearest = min(alike, key=lambda known: abs(known - wanted), default=None)
        factor = 1.0 if nearest is None else factors[nearest].mean
        return factor * self._forward_cost(num_rows + num_drafts)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Update the factors with a step without prompts."""
        self._num_steps += 1
        factors = self._factors[num_rows.bit_length()]
        found = seconds / self._forward_cost(num_rows + num_drafts)
        factor = factors.setdefault(num_drafts.bit_length(), _Factor(found, self._num_steps))
        age = self._num_steps - factor.last_step
        weight = min(1 - (1 - self._WEIGHT) ** age, self._MAX_WEIGHT)
        factor.mean += weight * (min(found, self._OUTLIER * factor.mean) - factor.mean)
        factor.last_step = self._num_steps
        if not num_drafts:
            for drafted in factors.values():
                drafted.mean -= self._DECAY * max(0.0, drafted.mean - factor.mean)
