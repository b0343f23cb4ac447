"""A batch processor (contract 3) that runs the requests' own processors.

`ShippedProcessors` follows the persistent batch, groups the rows by processor, and calls each processor once a step
with the rows of its group and nothing else.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.author_code.calls import non_finite_fault
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows, rows_of_drafts
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import StepTrace

from . import guarded_run
from .deferred_calls import BEFORE_ALL, DeferredCall, DeferredCalls, SavedRow
from .early_calls import EarlyCalls
from .executor import ExecutorRow, ExecutorSequence, LoadedProcessor, LogitsUse, Run, RunOutcome
from .internal_faults import attempt
from .processor_groups import (
    GroupStage,
    ObserveCall,
    ProcessorGroup,
    ProcessorUse,
    StageKey,
    StageLogits,
    group_rows,
    in_run_order,
    uses_of,
)
from .request_view import ModelView

CallObserver: TypeAlias = Callable[[LoadedProcessor], ObserveCall]
"""Returns the observer of a processor's calls."""


def _false(use: ProcessorUse) -> bool:
    return False


def observe_nothing(processor: LoadedProcessor) -> ObserveCall:
    """Return an observer that does nothing."""
    return _noop


def _noop(num_rows: int, seconds: float, logits_use: LogitsUse) -> None:
    pass


class ShippedProcessors(LogitsProcessor):
    """Runs the requests' own processors, see the module.

    Args:
        vllm_config: unused; part of the contract.
        device: unused; part of the contract.
        is_pin_memory: unused; part of the contract.
        model: view of the model for processors.
        uses: returns a request's processors from its sampling params.
        is_kept: returns whether a sequence whose row was removed will be added again, perhaps in another row. Its state
            is then kept. Called whenever the batch changes, and by `close_absent`.
        on_call: returns the observer that is called after each call of a processor. Looked up when the batch changes.
        check_last: check the logits also after the last processor of a row. False if the caller checks all rows anyway
            and calls `fault_of` for rows with NaN, +inf or no finite logit.
        deferred: decides which calls a step does not wait for, and keeps them; None: all are waited for.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        *,
        model: ModelView,
        uses: Callable[[SamplingParams], Sequence[ProcessorUse]] = uses_of,
        is_kept: Callable[[ProcessorUse], bool] = _false,
        on_call: CallObserver = observe_nothing,
        check_last: bool = True,
        deferred: DeferredCalls | None = None,
    ) -> None:
        self._model = model
        self._uses = uses
        self._is_kept = is_kept
        self._on_call = on_call
        self._check_last = check_last
        self._calls = DeferredCalls() if deferred is None else deferred
        self._rows: BatchRows[list[ProcessorUse]] = BatchRows(self._attach)
        self._members: dict[ProcessorUse, None] = {}
        self._stages: list[GroupStage] = []
        self._faults: dict[int, ProcessorFault] = {}
        self._tenant_seconds: dict[str, float] = {}
        self._deferred: dict[int, ProcessorUse] = {}
        self._owners: dict[int, ProcessorUse] = {}
        self._has_absent = False
        self._early = EarlyCalls(self._calls, model.vocab_size)
        self._trace = StepTrace({})

    def is_argmax_invariant(self) -> bool:
        """Return False: a shipped processor may edit its rows in any way."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch."""
        if batch_update is not None and self._rows.update(batch_update):
            self.close_absent()
            for use in self._members:
                use.merge_shared_counts()
            self._stages = group_rows(self._rows, self._on_call)
        elif self._has_absent:
            self.close_absent()

    def close_absent(self) -> None:
        """Close the sequences that have no row and will not be added again."""
        present = {use for members in self._rows.values() for use in members}
        absent = [use for use in self._members if use not in present]
        closed = [use for use in absent if not self._is_kept(use)]
        for use in closed:
            del self._members[use]
            use.attached_row.close()
            self._calls.discard(use)
            use.executor_row = None
        self._has_absent = len(closed) < len(absent)

    def begin(self) -> None:
        """Begin calls of the next `apply` before its logits exist. Optional, between `update_state` and `apply`.

        Only each row's first processor: a later one is not called if the row sits the step out before.
        """
        if not self._stages:
            return
        first = self._stages[0]
        self._early.begin(first.without(self._rows_after(first.key)) if self._calls.has_saved else first)

    def _rows_after(self, stage: StageKey) -> set[int]:
        """Return the rows that went through a stage in an earlier step."""
        saved = {row: self._calls.saved(members[0]) for row, members in self._rows.items() if members}
        return {row for row, each in saved.items() if each is not None and each.done >= stage}

    def may_restrict(self, row: int) -> bool:
        """Return whether `restrict` may leave few tokens of a row."""
        uses = self._rows.get(row, ())
        return any(use.processor.is_trusted or self._early.is_forcing(use.processor) for use in uses)

    def restrict(self, allowed: Mapping[int, AllowedTokens]) -> None:
        """Forbid what the next `apply` will set to -inf in some rows, as far as their histories alone decide it.

        Args:
            allowed: the tokens of each of these rows, to be restricted.
        """
        trusted: defaultdict[LoadedProcessor, dict[ProcessorUse, AllowedTokens]] = defaultdict(dict)
        shipped: dict[ProcessorUse, AllowedTokens] = {}
        for row, each in allowed.items():
            members = self._rows.get(row, ())
            for number, member in enumerate(members):
                if not member.processor.is_mask:
                    each.edit_values()
                if member.processor.is_trusted:
                    trusted[member.processor][member] = each
                elif number == 0 and sum(not other.processor.is_trusted for other in members) == 1:
                    shipped[member] = each
                else:
                    each.leave_open()
        for processor, pairs in trusted.items():
            began = time.perf_counter()
            rows, tokens = [member.attached_row for member in pairs], [*pairs.values()]
            fault = attempt(processor, partial(processor.executor.restrict, processor, rows, tokens))
            if fault is not None:
                for each in tokens:
                    each.leave_open()
            seconds = (time.perf_counter() - began) / len(pairs)
            for member in pairs:
                member.own_count.add(0, seconds)
        if shipped:
            self._early.restrict(shipped)

    def skip(self, rows: Iterable[int]) -> None:
        """Count a call for each processor of some rows, whose next tokens are forced, so that no `apply` follows."""
        for row in rows:
            for member in self._rows.get(row, ()):
                member.own_count.add(1, self._early.skip(member))

    @property
    def begun_rows(self) -> list[int]:
        """Rows whose calls have begun, and wait for `apply`."""
        return self._early.rows

    def abandon(self, kept: Collection[int] = ()) -> None:
        """End the calls that no `apply` took, as their logits will not come: the step failed, or their sequences ended.

        Args:
            kept: rows that will have logits. Calls with one of them go on.
        """
        self._early.abandon(kept)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run every group on its own rows, in place.

        The groups of a stage have no row in common: all begin before the first one finishes, so that processes of their
        own run in parallel, and beside the processors of this process. The stages of a tenant share one deadline.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` and `take_deferred()` are zeros and must not be used.
        """
        self._tenant_seconds.clear()
        self._run(self._stages, logits)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run the groups on some rows of the batch, see `SpeculativeLogitsProcessor`.

        A processor never sees a rejected draft token, so no state has to be rolled back. The deadline is that of the
        step, which began with `apply`.
        """
        batch_rows = rows_of_drafts(num_draft_tokens)
        new_rows = {batch_row: row for row, batch_row in enumerate(batch_rows)}
        self._run([stage.select(new_rows) for stage in self._stages], logits, batch_rows)
        self._faults = {batch_rows[row]: fault for row, fault in self._faults.items()}
        self._deferred = {batch_rows[row]: use for row, use in self._deferred.items()}
        return logits

    def watch(self, trace: StepTrace) -> None:
        """Record the rows in `trace` after each processor, from the next call on."""
        self._trace = trace

    def _run(self, stages: Iterable[GroupStage], logits: torch.Tensor, batch_rows: Sequence[int] | None = None) -> None:
        """Run the stages.

        Args:
            stages: groups of rows of the logits.
            logits: float32 [rows, vocab].
            batch_rows: the row of the batch for each row of the logits; None: the same.
        """
        self._faults, self._deferred, self._owners = {}, {}, {}  # drop those of a step that failed elsewhere
        done: dict[int, StageKey] = {}
        if self._calls.has_saved or self._calls.patience.is_limited or self._early.is_ahead:
            self._owners = self._first_uses(range(len(logits)) if batch_rows is None else batch_rows)
            done = self._resume(logits)
        previous = BEFORE_ALL
        for stage in stages:
            passed = [row for row, key in done.items() if key >= stage.key]
            if self._faults or self._deferred or passed:
                stage = stage.without({*self._faults, *self._deferred, *passed})
            self._run_stage(stage, logits, previous)
            previous = stage.key
        if self._deferred:
            logits[list(self._deferred)] = 0.0
        for row in done:
            if row not in self._deferred:
                self._calls.discard(self._owners[row])

    def _run_stage(self, stage: GroupStage, logits: torch.Tensor, previous: StageKey) -> None:
        """Call the processors of a stage: those in this process while the sandboxed ones run."""
        if stage.concurrent:
            stage = self._early.split(stage)
        stage_logits = StageLogits(stage, logits, self._early.observe)
        begun = self._begin_stage(stage, stage_logits, previous) if stage.concurrent else ()
        for group in stage.local:
            self._finish(group, guarded_run.call(group, stage_logits.rows_of(group)), stage_logits)
        if begun:
            self._end_stage(stage, stage_logits, begun)

    def _end_stage(self, stage: GroupStage, logits: StageLogits, begun: Iterable[tuple[ProcessorGroup, Run]]) -> None:
        """Finish or defer the calls of a stage."""
        slowest: dict[str, float] = {}
        finished = []
        for group, run in begun:
            tenant = group.processor.tenant
            left = self._calls.left(group)
            if left == math.inf or run.wait(left):
                self._calls.ended_in_time(group)
                outcome = run.finish(logits.collector_of(group))
                if outcome.charged:
                    slowest[tenant] = max(slowest.get(tenant, 0.0), outcome.charged)
                finished.append((group, outcome))
            else:
                self._defer(group, logits.rows_of(group), run, stage.key)
        for tenant, seconds in slowest.items():
            self._tenant_seconds[tenant] = self._tenant_seconds.get(tenant, 0.0) + seconds
        failed = logits.apply_edits()
        for group, outcome in finished:
            if group in failed:
                outcome = guarded_run.failed(group, failed[group])
            seconds = logits.apply_seconds.get(group, 0.0)
            self._finish(group, outcome._replace(occupied=outcome.occupied + seconds), logits)

    def _begin_stage(
        self, stage: GroupStage, logits: StageLogits, previous: StageKey
    ) -> list[tuple[ProcessorGroup, Run]]:
        """Begin the calls of a stage that `begin` has not begun, and give the others their logits if they need them.

        Rows whose processor is busy are saved: also those beside rows of an early call that has not ended.
        """
        begun = []
        in_early_calls = set[str]()
        for group in stage.concurrent:
            name = group.processor.group_name
            has_begun = self._early.is_busy(name)
            run = self._early.take(group)
            if run is not None:
                if run.needs_logits():
                    run.provide(logits.rows_of(group))
                    in_early_calls |= {name} if has_begun else set()
            elif name in in_early_calls or self._calls.is_busy(name) or self._early.is_busy(name):
                self._save(group, logits.rows_of(group), previous)
                continue
            else:
                seconds_used = self._tenant_seconds.get(group.processor.tenant, 0.0)
                run = guarded_run.begin(group, logits.rows_of(group), seconds_used)
                self._calls.begun(group, run)
            begun.append((group, run))
        return begun

    def _first_uses(self, batch_rows: Sequence[int]) -> dict[int, ProcessorUse]:
        """Return the first processor of each row of the logits. It identifies the sequence in `DeferredCalls`."""
        return {row: uses[0] for row, batch_row in enumerate(batch_rows) if (uses := self._rows.get(batch_row))}

    def _resume(self, logits: torch.Tensor) -> dict[int, StageKey]:
        """Give saved rows the logits that an earlier step left.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            The last stage that each of these rows has gone through.
        """
        done = {}
        for row, owner in self._owners.items():
            saved = self._calls.saved(owner)
            if saved is not None:
                logits[row] = saved.logits
                done[row] = saved.done
                self._trace.resume(row, saved.trace)
                if saved.fault is not None:
                    self._faults[row] = saved.fault
        return done

    def _save(self, group: ProcessorGroup, rows: torch.Tensor, done: StageKey) -> None:
        """Save rows for a later step, in which they continue with the stage after `done`."""
        for row, row_logits in zip(group.rows, rows.clone(), strict=True):
            self._deferred[row] = owner = self._owners[row]
            self._calls.save(owner, SavedRow(row_logits, done, trace=self._trace.take(row)))

    def _defer(self, group: ProcessorGroup, rows: torch.Tensor, run: Run, stage: StageKey) -> None:
        """Continue a call after the step. Its rows sit out until it has ended."""
        copied = rows.clone()
        run.defer(copied)
        group.stop_sharing_count()
        owners = [self._owners[row] for row in group.rows]
        traces = [self._trace.take(row) for row in group.rows]
        self._deferred |= dict(zip(group.rows, owners, strict=True))
        for owner in owners:
            self._calls.discard(owner)
        self._calls.add(DeferredCall(run, group, stage, copied, traces, owners, self._read))

    def _read(self, group: ProcessorGroup, rows: torch.Tensor, outcome: RunOutcome) -> dict[int, ProcessorFault]:
        """Return the faults of a deferred call, by row of the call."""
        return self._faults_of(group, rows, outcome) if self._needs_check(group, outcome) else {}

    def take_deferred(self) -> list[int]:
        """Return the rows that sampled no token in the last call, because they sit out, and clear them."""
        deferred, self._deferred = list(self._deferred), {}
        return deferred

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """Return (row, fault) of the processors that failed in the last `apply`, and clear them."""
        if not self._faults:
            return []
        faults, self._faults = sorted(self._faults.items(), key=lambda item: item[0]), {}
        return faults

    def fault_of(self, row: int, logits: torch.Tensor) -> ProcessorFault | None:
        """Return the fault of the processor that left an unchecked row without a usable logit, see `check_last`.

        Args:
            row: row of the batch.
            logits: float32 [vocab].

        Returns:
            None if the row was checked, or no processor of it can be the cause.
        """
        for member in self._rows.get(row, ()):
            if member.is_last and not member.processor.is_trusted:
                return _non_finite_fault(logits, member)
        return None

    def _attach(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> list[ProcessorUse] | None:
        uses = in_run_order(self._uses(params))
        masks = [use for use in uses if use.processor.is_mask]
        # Masks run again after the other processors, and the sampler's own mask comes last.
        is_edited_later = 0 < len(masks) < len(uses) or params.allowed_token_ids is not None
        before = [*params.forbidding_fields]
        for use in uses:
            if use not in self._members:
                use.executor_row = self._row_at_executor(use, params, prompt_token_ids, output_token_ids)
                use.before, use.output_token_ids = tuple(before), output_token_ids
                use.is_last = use is uses[-1] and not is_edited_later
                self._members[use] = None
            before.append(use.processor.name)
        return uses or None

    def _row_at_executor(
        self, use: ProcessorUse, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> ExecutorRow:
        """Return the sequence's row at the processor's executor: its fork if it has one, else a new row."""
        forked_row, use.forked_row = use.forked_row, None
        if forked_row is None:
            sequence = ExecutorSequence(
                rid=use.rid,
                params=use.params,
                prompt_token_ids=prompt_token_ids or [],
                output_token_ids=output_token_ids,
                sampling_params=params,
                model=self._model,
                prepared=use.prepared,
            )
            return use.processor.executor.attach(use.processor, sequence)
        return forked_row

    def _finish(self, group: ProcessorGroup, outcome: RunOutcome, logits: StageLogits) -> None:
        """Count a finished call, check its rows and write them to the batch's logits.

        Args:
            group: the group that was called.
            outcome: result of the call.
            logits: logits of the stage, with all edits.
        """
        fault = attempt(group.processor, partial(self._take, group, outcome, logits))
        if fault is not None:
            self._faults |= dict.fromkeys(group.rows, fault)

    def _take(self, group: ProcessorGroup, outcome: RunOutcome, logits: StageLogits) -> None:
        group.count(outcome)
        if not group.processor.is_trusted:
            self._calls.patience.charge(group.processor.tenant, outcome.occupied)
        if self._needs_check(group, outcome):
            faults = self._faults_of(group, logits.rows_of(group), outcome)
            self._faults |= {group.rows[row]: fault for row, fault in faults.items()}
        if not group.is_adjacent:
            logits.write_back(group)
        if self._trace.traced:
            rows = logits.rows_of(group)
            name, digest = group.processor.name, group.processor.digest
            for row, row_logits in zip(group.rows, rows, strict=True):
                self._trace.record_processor(row, name, digest, row_logits, again=group.again)

    def _needs_check(self, group: ProcessorGroup, outcome: RunOutcome) -> bool:
        return bool(outcome.faults) or not (group.processor.is_trusted or (group.is_last and not self._check_last))

    def _faults_of(self, group: ProcessorGroup, rows: torch.Tensor, outcome: RunOutcome) -> dict[int, ProcessorFault]:
        """Return the faults of a call by its rows, and set these rows to zero.

        Those are rows on which the processor failed, or which have no usable logit.
        """
        faults = {}
        # One reduction finds all three faults: amax propagates NaN, +inf is the largest value, and -inf is the largest
        # only if no other value is left.
        largest = rows.amax(dim=-1).tolist()
        for row, number in enumerate(largest):
            fault = outcome.faults.get(row)
            if fault is None and not math.isfinite(number):
                fault = _non_finite_fault(rows[row], group.members[row])
            if fault is not None:
                faults[row] = fault
                rows[row] = 0.0
        return faults


def _non_finite_fault(logits: torch.Tensor, member: ProcessorUse) -> ProcessorFault:
    processor = member.processor
    return non_finite_fault(logits, name=processor.name, digest=processor.digest, before=member.before)
