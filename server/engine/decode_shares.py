"""Fair shares of the time that decoding takes: which sequences take part in a step while several tenants run.

A step reads the keys and values of all its sequences. A full batch of long sequences may take ten times as long as the
few of another tenant, who would wait for it at every token. So long ones take turns: then a step is at most about twice
as long as for the tenant with the least work. A sequence that sits out a step keeps its slot and its state.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from logitship.server.metrics.step_clock import StepTime
from logitship.server.requests.sequence import Sequence

from .forward_pass import positions

DECODE_SHARE = 0.5
"""While several tenants run, sequences may add this fraction of the fixed time of a step, plus twice what the tenant
with the least work adds. In a step with prompts, down to half of the fraction."""


@dataclass
class DecodeShares:
    """Chooses the decoding sequences of a step.

    Guarantees:
    * The tenant with the least work is never held up.
    * The sequences of the others take turns. The beams of a search have theirs together.
    * A sequence that costs more than its tenant's share of a step runs once the shares of enough steps have been saved.

    Attributes:
        time: model of the time of steps.
        left: seconds that the selected sequences and the prompts leave over for other work of the step.
    """

    time: StepTime = field(default_factory=StepTime)
    left: float = 0.0
    _turns: WeakKeyDictionary[Sequence, int] = field(default_factory=WeakKeyDictionary)
    """Number of the last turn of each sequence that had one."""
    _turn: int = 0
    _saved: dict[str, float] = field(default_factory=dict)
    """Seconds of its shares that each tenant has not used."""

    def select(self, sequences: abc.Sequence[Sequence], prompts: float = 0.0) -> list[Sequence]:
        """Return the sequences that take part in the next step, in the same order.

        Args:
            sequences: those of several tenants that could. Only decoding ones are left out.
            prompts: seconds that the prompts of the step will take.
        """
        decoding: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            own = decoding.setdefault(sequence.tenant, [])  # empty for one that waits for its first token
            if not sequence.prefilling:
                own.append(sequence)
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


def split(most: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Divide an amount by max-min fairness: each gets an equal share, or all that it wants if that is less."""
    given = dict.fromkeys(wanted, 0.0)
    for number, key in enumerate(sorted(wanted, key=wanted.__getitem__)):
        given[key] = min(wanted[key], most / (len(wanted) - number))
        most -= given[key]
    return given
