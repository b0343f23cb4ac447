"""A batch processor (contract 3) that runs the requests' own processors.

`ShippedProcessors` follows the persistent batch, groups the rows by processor, and calls each processor once a step
with the rows of its group and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import non_finite_fault
from logitship.sampler.batch_processors.batch_rows import BatchRows, rows_of_drafts
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.trace import StepTrace

from .executor import ExecutorRow, ExecutorSequence, LoadedProcessor, RunOutcome
from .processor_groups import (
    GroupRow,
    GroupStage,
    ObserveCall,
    ProcessorGroup,
    ProcessorUse,
    group_rows,
    in_run_order,
    uses_of,
)
from .request_view import ModelView

CallObserver: TypeAlias = Callable[[LoadedProcessor], ObserveCall]
"""Returns the observer of a processor's calls."""


def _false(use: ProcessorUse) -> bool:
    return False


def _observe_nothing(processor: LoadedProcessor) -> ObserveCall:
    return _noop


def _noop(num_rows: int, seconds: float) -> None:
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
        on_call: CallObserver = _observe_nothing,
        check_last: bool = True,
    ) -> None:
        self._model = model
        self._uses = uses
        self._is_kept = is_kept
        self._on_call = on_call
        self._check_last = check_last
        self._rows: BatchRows[list[GroupRow]] = BatchRows(self._attach)
        self._members: dict[ProcessorUse, GroupRow] = {}
        self._stages: list[GroupStage] = []
        self._faults: dict[int, ProcessorFault] = {}
        self._spent: dict[str, float] = {}
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

    def close_absent(self) -> None:
        """Close the sequences that have no row and will not be added again."""
        present = {member.use for members in self._rows.values() for member in members}
        for use in [use for use in self._members if use not in present and not self._is_kept(use)]:
            self._members.pop(use).executor_row.close()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run every group on its own rows, in place.

        The groups of a stage have no row in common: all begin before the first one finishes, so that processes of their
        own run in parallel. The stages of a tenant share one deadline.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` are zeros and must not be used.
        """
        self._spent.clear()
        self._run(self._stages, logits)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run the groups on some rows of the batch, see `SpeculativeLogitsProcessor`.

        A processor never sees a rejected draft token, so no state has to be rolled back. The deadline is that of the
        step, which began with `apply`.
        """
        rows = rows_of_drafts(num_draft_tokens)
        places = {row: place for place, row in enumerate(rows)}
        self._run([stage.select(places) for stage in self._stages], logits)
        self._faults = {rows[place]: fault for place, fault in self._faults.items()}
        return logits

    def watch(self, trace: StepTrace) -> None:
        """Record the rows in `trace` after each processor, from the next call on."""
        self._trace = trace

    def _run(self, stages: Iterable[GroupStage], logits: torch.Tensor) -> None:
        self._faults = {}  # drop the faults of a step that failed elsewhere
        for stage in stages:
            if self._faults:
                stage = stage.without(self._faults)
            begun = [
                (group, rows, group.executor_group.begin(rows, self._spent.get(group.processor.tenant, 0.0)))
                for group, rows in stage.rows_of(logits)
            ]
            slowest: dict[str, float] = {}
            for group, rows, run in begun:
                outcome = run.finish()
                if outcome.charged:
                    tenant = group.processor.tenant
                    slowest[tenant] = max(slowest.get(tenant, 0.0), outcome.charged)
                self._finish(group, rows, outcome, logits)
            for tenant, seconds in slowest.items():
                self._spent[tenant] = self._spent.get(tenant, 0.0) + seconds

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
            if member.is_last and not member.use.processor.is_trusted:
                return _non_finite_fault(logits, member)
        return None

    def _attach(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> list[GroupRow] | None:
        uses = in_run_order(self._uses(params))
        masks = [use for use in uses if use.processor.is_mask]
        # Masks run again after the other processors, and the sampler's own mask comes last.
        is_edited_later = 0 < len(masks) < len(uses) or params.allowed_token_ids is not None
        rows: list[GroupRow] = []
        before = [*params.forbidding_fields]
        for use in uses:
            if use not in self._members:
                executor_row = self._row_at_executor(use, params, prompt_token_ids, output_token_ids)
                is_last = use is uses[-1] and not is_edited_later
                self._members[use] = GroupRow(use, executor_row, tuple(before), is_last)
            rows.append(self._members[use])
            before.append(use.processor.name)
        return rows or None

    def _row_at_executor(
        self, use: ProcessorUse, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> ExecutorRow:
        """Return the sequence's row at the processor's executor: its fork if it has one, else a new row."""
        use.executor_row, use.forked_row = use.forked_row, None
        if use.executor_row is None:
            sequence = ExecutorSequence(
                rid=use.rid,
                params=use.params,
                prompt_token_ids=prompt_token_ids or [],
                output_token_ids=output_token_ids,
                sampling_params=params,
                model=self._model,
                prepared=use.prepared,
            )
            use.executor_row = use.processor.executor.attach(use.processor, sequence)
        return use.executor_row

    def _finish(self, group: ProcessorGroup, rows: torch.Tensor, outcome: RunOutcome, logits: torch.Tensor) -> None:
        """Count a finished call, check its rows and write them to the batch's logits.

        Args:
            group: the group that was called.
            rows: float32 [rows of the group, vocab]: a view of the batch's logits if the group is adjacent.
            outcome: result of the call.
            logits: logits of the batch.
        """
        group.count(outcome)
        if outcome.faults or not (group.processor.is_trusted or (group.is_last and not self._check_last)):
            self._check(group, rows, outcome)
        if not group.is_adjacent:
            logits[group.rows] = rows
        if self._trace.top:
            for place, row in enumerate(group.rows):
                name, digest = group.processor.name, group.processor.digest
                self._trace.record_processor(row, name, digest, rows[place], again=group.again)

    def _check(self, group: ProcessorGroup, rows: torch.Tensor, outcome: RunOutcome) -> None:
        """Set the rows to zero on which a processor failed, or which have no usable logit."""
        # One reduction finds all three faults: amax propagates NaN, +inf is the largest value, and -inf is the largest
        # only if no other value is left.
        largest = rows.amax(dim=-1).tolist()
        for place, (row, number) in enumerate(zip(group.rows, largest, strict=True)):
            fault = outcome.faults.get(place)
            if fault is None and not math.isfinite(number):
                fault = _non_finite_fault(rows[place], group.members[place])
            if fault is not None:
                self._faults[row] = fault
                rows[place] = 0.0


def _non_finite_fault(logits: torch.Tensor, member: GroupRow) -> ProcessorFault:
    processor = member.use.processor
    return non_finite_fault(logits, name=processor.name, digest=processor.digest, before=member.before)
