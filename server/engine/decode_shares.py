"""Fair shares of the time that decoding takes: which sequences take part in a step while several tenants run.

A step reads the keys and values of all its sequences. A full batch of long sequences may take ten times as long as the
few of another tenant, who would wait for it at every token. So long ones take turns: then a step is at most about twice
as long as for the tenant with the least work. What sits a step out keeps its slot and its state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from logitship.server.requests.sequence import Sequence

DECODE_SHARE = 0.5
"""Most time that sequences add to a step while several tenants run, beyond twice what the tenant with the least work
adds: this part of what a step takes for any number of sequences. In a step with prompts, down to half as much."""

SEQUENCE_COST = 128
"""Cost of a sequence without its positions, in positions: about 1 ms beside 6 microseconds, a model of 135 million
parameters on two cores."""

_MEMORY = 1 - 1 / 64
"""Weight of an observation beside the next one."""

_LEAST_SPREAD = 0.05
"""Least standard deviation of the observed positions, as a part of their mean, that tells their cost from the rest."""


@dataclass
class StepTime:
    """The time of a step without prompts, as a line: a part for each position, and the rest.

    Least squares over the last steps, with exponentially fading weights.

    Attributes:
        per_position: seconds for each position that the step attends to; 0 until steps with different numbers were
            observed.
        base: seconds of a step without any.
    """

    per_position: float = 0.0
    base: float = 0.0
    _weight: float = 0.0
    _mean: tuple[float, float] = (0.0, 0.0)
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, positions: int, seconds: float) -> None:
        """Add a step."""
        self._weight = self._weight * _MEMORY + 1
        share = 1 / self._weight
        off = positions - self._mean[0], seconds - self._mean[1]
        self._mean = self._mean[0] + share * off[0], self._mean[1] + share * off[1]
        self._variance = (1 - share) * (self._variance + share * off[0] * off[0])
        self._covariance = (1 - share) * (self._covariance + share * off[0] * off[1])
        if self._variance > (_LEAST_SPREAD * self._mean[0]) ** 2:
            # Not more than all of the time: others may have slowed the long steps down.
            slope = max(0.0, self._covariance / self._variance)
            self.per_position = min(slope, self._mean[1] / self._mean[0])
        self.base = max(0.0, self._mean[1] - self.per_position * self._mean[0])

    def expected(self, positions: int) -> float:
        """Return the seconds that a step probably takes."""
        return self.base + self.per_position * positions


@dataclass
class DecodeShares:
    """Chooses the decoding sequences of a step.

    Guarantees:
    * The tenant with the least work is never held up.
    * The sequences of the others take turns. The beams of a search have theirs together.
    * What costs more than its tenant's share of a step has its turn when the shares of so many steps have been saved.

    Attributes:
        time: what steps take.
        left: seconds that the selected sequences, and the prompts, have left for other work of the step.
    """

    time: StepTime = field(default_factory=StepTime)
    left: float = 0.0
    _turns: WeakKeyDictionary[Sequence, int] = field(default_factory=WeakKeyDictionary)
    """Number of the last turn of each sequence that had one."""
    _turn: int = 0
    _saved: dict[str, float] = field(default_factory=dict)
    """Seconds of its shares that each tenant has not used."""

    def select(self, sequences: Row[Sequence], prompts: float = 0.0) -> list[Sequence]:
        """Return the sequences that take part in the next step, in the same order.

        Args:
            sequences: those of several tenants that could. Only decoding ones are left out.
            prompts: seconds that the prompts of the step will take.
        """
        decoding: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            if not sequence.prefilling:
                decoding.setdefault(sequence.tenant, []).append(sequence)
        costs = {tenant: self._cost(own) for tenant, own in decoding.items()}
        least = min(costs.values(), default=0.0)
        share = DECODE_SHARE * self.time.base
        most = max(share - min(prompts, share / 2) + 2 * least, len(costs) * least)
        self.left = max(0.0, most - sum(costs.values()))
        if len(costs) < 2 or sum(costs.values()) <= most:
            self._saved.clear()
            return list(sequences)
        left_out: set[Sequence] = set()
        for tenant, given in split(most, costs).items():
            if given < costs[tenant] and costs[tenant] > least:
                left_out.update(self._without_turn(tenant, decoding[tenant], given))
        return [sequence for sequence in sequences if sequence not in left_out]

    def _without_turn(self, tenant: str, sequences: list[Sequence], given: float) -> list[Sequence]:
        """Return the sequences of a tenant that sit the step out. The others have waited longest."""
        together: dict[Sequence, list[Sequence]] = {}
        for sequence in sequences:
            together.setdefault(sequence.lead, []).append(sequence)
        waiting = deque(sorted(together, key=lambda lead: self._turns.get(lead, 0)))
        left = given + self._saved.get(tenant, 0.0)
        while waiting and (cost := self._cost(together[waiting[0]])) <= left:
            left -= cost
            self._turn += 1
            self._turns[waiting.popleft()] = self._turn
        self._saved[tenant] = left
        return [sequence for lead in waiting for sequence in together[lead]]

    def _cost(self, sequences: Iterable[Sequence]) -> float:
        return self.time.per_position * positions(sequences)


def positions(sequences: Iterable[Sequence]) -> int:
    """Return what a step with these sequences costs, in positions of their keys and values."""
    return sum(SEQUENCE_COST + sequence.num_computed for sequence in sequences)


def split(most: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Divide an amount: each gets as much, or all that it wants."""
    given = dict.fromkeys(wanted, 0.0)
    for number, key in enumerate(sorted(wanted, key=wanted.__getitem__)):
        given[key] = min(wanted[key], most / (len(wanted) - number))
        most -= given[key]
    return given
