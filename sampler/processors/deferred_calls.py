"""Calls that a step does not wait for, and the rows that sit out steps until such a call has ended.

A sandboxed processor may take longer than the rest of a step. While other sequences run, a step waits for a call no
longer than `StepPatience` allows, and not at all if the processor's last call took longer. Then the call is *deferred*:
it continues in its sandbox, its rows sample no token, and the engine plans the next steps without them. When the call
has ended, the rows are computed again, get the logits as edited by the call, and continue with the stages after it.

Guarantees:
* A processor is called once for each token of a row, in order, and sees what it would see in an undisturbed run.
* A processor with a deferred call is not called again before that has ended: its other rows sit out as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.trace import Snapshot, after_processor

from .executor import Run, RunOutcome
from .internal_faults import attempt
from .processor_groups import ProcessorGroup, ProcessorUse, StageKey

_MAX_KNOWN = 1024
"""Number of processors whose last calls are remembered. Most of them are never called again."""

_LONG_CALL = 0.005
"""CPU seconds of a deferred call, above which the processor's next calls begin at the lowest priority: half of the
minimum wait of a step."""

BEFORE_ALL: StageKey = (False, -1)
"""Key before that of the first stage."""


class StepPatience(Protocol):
    """Decides how long a step waits for processors."""

    @property
    def is_limited(self) -> bool:
        """False if the current step waits for all calls until they end."""
        ...

    def left(self, tenant: str, num_rows: int = 1) -> float:
        """Return how long the current step still waits for a call, in seconds; infinity: until it ends.

        Args:
            tenant: owner of the processor.
            num_rows: rows that the call is made for. If nothing else runs, there is nothing else to do.
        """
        ...

    def charge(self, tenant: str, seconds: float) -> None:
        """Account for a call of a tenant's processor that has ended."""
        ...


class EndlessPatience:
    """Waits for all calls."""

    is_limited = False

    def left(self, tenant: str, num_rows: int = 1) -> float:
        """Return infinity: a step waits until the call ends."""
        return math.inf

    def charge(self, tenant: str, seconds: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, eq=False)
class SavedRow:
    """A row that samples no token before it has gone through its remaining stages.

    Attributes:
        logits: float32 [vocab], after the stage `done`.
        done: the last stage that has ended.
        fault: the fault of its processor in that stage.
        trace: the row's trace so far.
    """

    logits: torch.Tensor
    done: StageKey
    fault: ProcessorFault | None = None
    trace: list[Snapshot] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """A call that no step waits for.

    Attributes:
        run: the call.
        group: the rows at the time of the call.
        stage: its stage.
        logits: float32 [rows, vocab]: what the call edits.
        traces: each row's trace so far, by row of the call.
        owners: the first processor of each row, which identifies it.
        read: returns the faults of the call, by its rows.
    """

    run: Run
    group: ProcessorGroup
    stage: StageKey
    logits: torch.Tensor
    traces: list[list[Snapshot]]
    owners: list[ProcessorUse]
    read: Callable[[ProcessorGroup, torch.Tensor, RunOutcome], dict[int, ProcessorFault]]


@dataclass
class _LastCall:
    """Facts about a processor's last call.

    Attributes:
        tenant: owner of the processor.
        was_deferred: a step did not wait for it.
        is_long: it used more than `_LONG_CALL`; None: that is not known.
    """

    tenant: str
    was_deferred: bool = False
    is_long: bool | None = None


class DeferredCalls:
    """The deferred calls of an engine, and the rows they are made for. Engine thread only.

    Args:
        patience: is charged for the calls.

    Attributes:
        kept: processors of running sequences that have no row at the moment. Written by the engine.
        num_deferred: calls that were deferred so far.
    """

    def __init__(self, patience: StepPatience | None = None) -> None:
        self.patience: StepPatience = patience or EndlessPatience()
        self.kept: Collection[ProcessorUse] = frozenset()
        self.num_deferred = 0
        self._calls: list[DeferredCall] = []
        self._saved: dict[ProcessorUse, SavedRow] = {}
        self._busy: set[str] = set()
        self._last: dict[str, _LastCall] = {}
        """By the name of the processor."""
        self._tried: set[str] = set()
        """Tenants with a new processor that began at the normal priority in this step."""

    def left(self, group: ProcessorGroup) -> float:
        """Return how long the current step still waits for a call of a group, in seconds; see `StepPatience.left`."""
        left = self.patience.left(group.processor.tenant, len(group.rows))
        return 0.0 if left < math.inf and self.is_slow(group.processor.group_name) else left

    def is_slow(self, group_name: str) -> bool:
        """Return whether the last call of a processor was deferred."""
        return group_name in self._last and self._last[group_name].was_deferred

    def ended_in_time(self, group: ProcessorGroup) -> None:
        """Record that a step did not have to defer a call of a group."""
        last = self._last_call(group)
        last.was_deferred = last.is_long = False

    def _last_call(self, group: ProcessorGroup) -> _LastCall:
        name = group.processor.group_name
        last = self._last.get(name)
        if last is None:
            if len(self._last) >= _MAX_KNOWN:
                self._last.clear()
            last = self._last[name] = _LastCall(group.processor.tenant)
        return last

    def begin_step(self) -> None:
        """Begin a step."""
        self._tried.clear()

    def begun(self, group: ProcessorGroup, run: Run) -> None:
        """Lower the priority of a call that has begun if it may take long while other sequences run.

        It may take long if the processor's last call did. For a new processor, that is not known: only one call per
        tenant and step keeps its priority to measure it, and none while another processor of the tenant takes long.
        Otherwise, each of many new processors would take a core from the model until its call is deferred.
        """
        if self.patience.is_limited and self._may_take_long(group):
            run.lower_priority()

    def _may_take_long(self, group: ProcessorGroup) -> bool:
        tenant, last = group.processor.tenant, self._last.get(group.processor.group_name)
        if last is not None and last.is_long is not None:
            return last.is_long
        if tenant in self._tried:
            return True
        self._tried.add(tenant)
        return any(call.group.processor.tenant == tenant for call in self._calls) or any(
            other.tenant == tenant and other.is_long for other in self._last.values()
        )

    def __len__(self) -> int:
        """Return the number of calls that have not ended."""
        return len(self._calls)

    @property
    def has_saved(self) -> bool:
        """True if a row is saved."""
        return bool(self._saved)

    def is_busy(self, group_name: str) -> bool:
        """Return whether a processor cannot be called now, see `LoadedProcessor.group_name`."""
        return group_name in self._busy

    def is_kept(self, use: ProcessorUse) -> bool:
        """Return whether a processor's sequence is running, though it has no row."""
        return use in self.kept

    def any_busy(self, uses: Iterable[ProcessorUse]) -> bool:
        """Return whether a sequence with these processors has to sit out."""
        return bool(self._busy) and any(use.processor.group_name in self._busy for use in uses)

    def add(self, call: DeferredCall) -> None:
        """Take over a call from its step."""
        self._calls.append(call)
        self._busy.add(call.group.processor.group_name)
        self._last_call(call.group).was_deferred = True
        self.num_deferred += 1

    def save(self, owner: ProcessorUse, row: SavedRow) -> None:
        """Save a row that cannot be sampled in this step."""
        self._saved[owner] = row

    def saved(self, owner: ProcessorUse) -> SavedRow | None:
        """Return the saved row of a sequence; None if it has none."""
        return self._saved.get(owner)

    def discard(self, owner: ProcessorUse) -> None:
        """Drop the saved row of a sequence that continues or has ended."""
        self._saved.pop(owner, None)

    def collect(self, timeout: float = 0.0) -> None:
        """Save the rows of the calls that have ended.

        Args:
            timeout: longest wait for the first one, in seconds.
        """
        for call in self._calls.copy():
            if call.run.wait(timeout):
                self._end(call)
            timeout = 0.0

    def _end(self, call: DeferredCall) -> None:
        self._calls.remove(call)
        self._busy.discard(call.group.processor.group_name)
        outcome = call.run.finish()
        self._last_call(call.group).is_long = outcome.occupied > _LONG_CALL
        fault = attempt(call.group.processor, partial(self._take, call, outcome))
        if fault is not None:
            for row, owner in enumerate(call.owners):
                self.save(owner, SavedRow(call.logits[row], call.stage, fault))

    def _take(self, call: DeferredCall, outcome: RunOutcome) -> None:
        call.group.count(outcome)
        self.patience.charge(call.group.processor.tenant, outcome.occupied)
        faults = call.read(call.group, call.logits, outcome)
        for row, owner in enumerate(call.owners):
            if owner.executor_row is not None:  # it has not ended
                logits, trace = call.logits[row], call.traces[row]
                if trace:
                    processor = call.group.processor
                    trace.append(after_processor(processor.name, processor.digest, logits, again=call.group.again))
                self.save(owner, SavedRow(logits, call.stage, faults.get(row), trace))
