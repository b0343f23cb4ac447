"""Chooses the running sequences that take part in a step. The others sit it out: they keep slot and state."""

from __future__ import annotations

from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.processor_groups import uses_of
from logitship.server.requests.sequence import Sequence

from .tenant_shares import TenantShares


class StepSelection:
    """Leaves out sequences that wait for a deferred call, and those of tenants over their share while others can run.

    Guarantees:
    * The sequences of one request take part together, unless they have different processors.
    * If any sequence waits for no call, some sequence takes part.
    """

    def __init__(self, deferred: DeferredCalls, shares: TenantShares) -> None:
        self._deferred = deferred
        self._shares = shares

    def __call__(self, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences that take part in the next step, in the same order."""
        self._shares.begin_step({sequence.tenant for sequence in running})
        ready = running
        if self._deferred:
            ready = [one for one in running if not self._deferred.any_busy(uses_of(one.sampling_params))]
        if not self._shares.is_limited:
            return ready
        over = {tenant for tenant in {one.tenant for one in ready} if self._shares.is_over(tenant)}
        return [one for one in ready if one.tenant not in over or not _ships(one)] or ready if over else ready


def _ships(sequence: Sequence) -> bool:
    return any(not use.processor.is_trusted for use in uses_of(sequence.sampling_params))
