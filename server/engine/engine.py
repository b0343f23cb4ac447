"""The engine: schedules, computes and samples one step at a time, on one thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from logitship.client.errors import LogitshipError, ProcessorFault
from logitship.sampler.batch.persistent_batch import PersistentBatch, adjacent_swaps
from logitship.sampler.ops.logprobs import RowLogprobs, token_logprobs
from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.processor_groups import group_key, uses_of
from logitship.sampler.row_errors import NonFiniteLogitsError, NoTokenLeftError
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.server.metrics.step_clock import StepClock
from logitship.server.model.kv_cache import PrefixCacheStats
from logitship.server.model.model_runner import ModelRunner
from logitship.server.requests.messages import FinishReason, RequestError, TokenLogprobs
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.forced_runs import ForcedRuns

from .beam_group import Beam, BeamGroup
from .failures import INTERNAL_ERROR, request_error
from .forward_pass import Plan, ScheduledChunk, StepLogits, forward, positions, prompt_logprob_offsets
from .scheduler import Scheduler
from .step_sampling import StepSampling
from .tenant_shares import TenantShares

logger = logging.getLogger(__name__)

_MAX_WAIT = 0.005
"""Seconds without a look at the inbox, where all running sequences wait for deferred calls."""


def _noop() -> None:
    pass


class Engine:
    """Continuous batching: sequences are added and removed between steps.

    Not thread-safe: every call is made on the `EngineThread`.

    Args:
        on_finished: called with each sequence that finished, for whatever reason, after its last chunk. A beam search
            finishes once, with its lead beam.
        clock: times the phases of a step.
        deferred: the calls of processors that steps do not wait for.
        shares: learns how long steps take.
        forced: finds forced tokens; None: none are looked for.
        on_emitted: called after chunks were emitted in the middle of a step.

    Attributes:
        num_steps: steps so far.
        num_drafted: draft tokens that were verified so far.
        num_accepted: draft tokens that were accepted so far.
        num_forced: output tokens so far that needed no forward pass of their own, because they were forced.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        batch: PersistentBatch[Sequence],
        on_finished: Callable[[Sequence], None],
        clock: StepClock | None = None,
        deferred: DeferredCalls | None = None,
        shares: TenantShares | None = None,
        forced: ForcedRuns | None = None,
        on_emitted: Callable[[], None] = _noop,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._batch = batch
        self._on_finished = on_finished
        self._on_emitted = on_emitted
        self._unemitted: list[Sequence] = []
        """Sequences whose last tokens have no chunk yet."""
        self._clock = clock or StepClock()
        self._deferred = DeferredCalls() if deferred is None else deferred
        self._shares = shares or TenantShares()
        self._forced = forced or ForcedRuns(sampler.drafter, 0)
        self.num_steps = self.num_drafted = self.num_accepted = self.num_forced = 0

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._scheduler.running)

    @property
    def num_deferred(self) -> int:
        """Calls of processors that a step did not wait for, so far."""
        return self._deferred.num_deferred

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._scheduler.waiting)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        self._scheduler.waiting.extend(sequences)

    def abort(
        self, matches: Callable[[Sequence], bool], error: Callable[[Sequence], RequestError | None] = lambda _: None
    ) -> None:
        """Abort the matching sequences now: the next step can use their rows.

        Args:
            matches: tells which.
            error: returns the error of one; None: it was cancelled.
        """
        for sequence in self._scheduler.matching(matches):
            self._end(sequence, FinishReason("abort", error=error(sequence)))

    def clear_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._scheduler.prefixes.clear()

    @property
    def prefix_stats(self) -> PrefixCacheStats:
        """Statistics of the prefix cache."""
        return self._scheduler.prefixes.stats()

    def step(self) -> bool:
        """Compute one step. A failure ends the sequences that ran, never the engine.

        Returns:
            False if there was nothing to do, and no deferred call has to be waited for.
        """
        self._deferred.collect()
        is_waiting = bool(self._deferred)
        plan = self._schedule()
        if plan:
            with self._guarded(plan):
                self._update_batch(plan)
                self._sampler.begin()
                self._emit()  # while sandboxes work
                plan = self._with_forced(plan)
                logits = self._forward(plan)
                self._advance(plan, logits)
                self._sample(plan, logits)
                self._finish_prompt_only(plan)
        else:
            self._emit()
            if is_waiting:
                self._deferred.collect(_MAX_WAIT)
        return bool(plan) or is_waiting

    @contextlib.contextmanager
    def _guarded(self, plan: Plan) -> Iterator[None]:
        """Count the step inside, and turn an exception in it into failed requests."""
        accepted_before, forced_before = self.num_accepted, self.num_forced
        try:
            yield
        # Whatever a step raises, the engine continues.
        except Exception:  # boundary: engine thread
            rids = sorted({sequence.rid for sequence in self._scheduler.running})
            logger.exception("a step failed: its requests end with an error", extra={"fields": {"request_ids": rids}})
            self._sampler.abandon()
            self._end_all_running()
        self.num_steps += 1
        num_positions = positions(chunk.sequence for chunk in plan.decode)
        num_forced = self.num_forced - forced_before
        # A forced token costs as much as a prompt token.
        self._shares.observe_step(self._clock.seconds_without_processors, plan.prompt_cost + num_forced, num_positions)
        if not num_forced:
            self._scheduler.observe(plan, self.num_accepted - accepted_before, time.perf_counter() - plan.started_at)

    def _schedule(self) -> Plan:
        with self._clock.schedule:
            plan = self._scheduler.schedule()
            self._deferred.kept = {use for sequence in plan.idle for use in uses_of(sequence.sampling_params)}
            return plan

    def _update_batch(self, plan: Plan) -> None:
        """Add the rows that sample for the first time or again, and tell the sampler what changed."""
        with self._clock.batch_update:
            for sequence in plan.idle:
                if sequence in self._batch:
                    self._batch.remove(sequence)
            for chunk in plan.chunks:
                if chunk.samples and chunk.sequence not in self._batch:
                    self._batch.add(chunk.sequence)
            self._keep_groups_adjacent()
            self._sampler.update_state(self._batch.commit())

    def _keep_groups_adjacent(self) -> None:
        """Reorder the rows, so that each processor gets its rows as a view of the logits, not as a copy."""
        if not self._batch.changed:
            return  # still adjacent since the last change
        self._batch.condense()
        keys = [group_key(sequence.sampling_params) for sequence in self._batch.members]
        if any(keys):
            for row_1, row_2 in adjacent_swaps(keys):
                self._batch.swap(row_1, row_2)

    def _emit(self) -> None:
        """Emit the chunks of the last step's tokens."""
        with self._clock.deliver:
            unemitted, self._unemitted = self._unemitted, []
            for sequence in unemitted:
                sequence.emit()
            if unemitted:
                self._on_emitted()

    def _with_forced(self, plan: Plan) -> Plan:
        """Add the tokens that are certain now: one forward pass computes them with the last one."""
        with self._clock.schedule:
            members = self._batch.members
            rows = [
                row
                for row, sequence in enumerate(members if self._forced.max_run else ())
                if not isinstance(sequence, Beam) and self._sampler.drafter.may_draft(row)
            ]
            if not rows:
                return plan
            num_positions = positions(chunk.sequence for chunk in plan.decode)
            most = self._scheduler.chunked_prefill_size
            budget = self._shares.num_forced_tokens(most, plan.prompt_cost, num_positions)
            runs = self._forced.find(members, rows, budget)
            return plan.with_forced(runs) if runs else plan

    def _forward(self, plan: Plan) -> StepLogits:
        with self._clock.forward:
            return forward(self._runner, plan, self._batch.members)

    def _advance(self, plan: Plan, logits: StepLogits) -> None:
        """Record what the forward pass computed: keys and values, and the log-probabilities of prompts."""
        with self._clock.deliver:
            self._take_prompt_logprobs(plan, logits.prompt)
            for chunk in plan.chunks:
                chunk.sequence.num_computed += len(chunk.token_ids)
            self._scheduler.share_prompts()  # before a sequence may finish and lose its slot

    def _take_prompt_logprobs(self, plan: Plan, logits: torch.Tensor) -> None:
        first = 0
        for chunk in plan.prefill:
            sequence = chunk.sequence
            offsets = prompt_logprob_offsets(chunk)
            params = sequence.sampling_params
            top = params.prompt_logprobs
            if top is None:
                continue
            # A prompt of one token may be computed again, see `DeferredCalls`.
            is_first = sequence.num_computed == 0 and not sequence.prompt_logprobs
            if is_first and params.prompt_logprobs_start == 0:
                sequence.prompt_logprobs.append(TokenLogprobs(sequence.prompt_token_ids[0], None, None))
            targets = [sequence.prompt_token_ids[sequence.num_computed + offset + 1] for offset in offsets]
            part, count = logits[first : first + len(offsets)], len(offsets)
            records = token_logprobs(part, targets, [top] * count, [params.logprob_token_ids or ()] * count)
            sequence.prompt_logprobs += [_public(record) for record in records]
            first += len(offsets)

    def _sample(self, plan: Plan, logits: StepLogits) -> None:
        """Sample each row's next token, then take its drafts, one depth at a time, until one is rejected."""
        with self._clock.deliver:
            members = self._batch.members
            self._clock.num_rows = len(members)
            chunks = {chunk.sequence: chunk for chunk in plan.chunks if chunk.drafts}
            drafts = {row: chunks[sequence] for row, sequence in enumerate(members) if sequence in chunks}
            self.num_drafted += sum(len(chunk.drafts) for chunk in drafts.values() if not chunk.is_forced)
            sampling = StepSampling(self._sampler, self._clock, logits, drafts)
            rows: abc.Sequence[int] = range(len(members))
            for depth in logits.depths:
                running = [row for each in sampling.sample(depth, rows) for row in self._deliver(members, *each)]
                rows = sampling.accept(depth, running)
                if not rows:
                    break
                for row in rows:
                    self._count_accepted(drafts[row])
                self._sampler.update_state(None)
            for row, chunk in drafts.items():
                if chunk.is_forced:
                    self._forced.observe(chunk.sequence, len(chunk.drafts), sampling.num_accepted[row])
            # A stop string may have ended a sequence in the middle of its run, for whose end a processor was called.
            self._sampler.abandon()

    def _count_accepted(self, chunk: ScheduledChunk) -> None:
        chunk.sequence.num_computed += 1
        if chunk.is_forced:
            self.num_forced += 1
            for use in uses_of(chunk.sequence.sampling_params):
                use.own_count.add(0, 0.0, forced_steps=1)
        else:
            self.num_accepted += 1

    def _deliver(self, members: list[Sequence], rows: Iterable[int], sampled: SamplerOutput) -> list[int]:
        """Append to each row's sequence its sampled token, and remove the sequences that finish.

        Returns:
            The rows that have a new token and are still running.
        """
        faults = dict(sampled.faults)
        running = []
        searching: dict[BeamGroup, dict[Sequence, RowLogprobs | LogitshipError]] = {}
        for place, row in enumerate(rows):
            sequence = members[row]
            if place in sampled.deferred:
                sequence.num_computed -= 1  # its last token is computed again when it goes on
                continue
            if isinstance(sequence, Beam):
                result = faults.get(place) or sampled.logprobs[place]
                assert result is not None
                searching.setdefault(sequence.group, {})[sequence] = result
                continue
            if place in faults:
                self._end_with_fault(sequence, faults[place])
                continue
            record = sampled.logprobs[place]
            logprobs = _public(record) if record else None
            sequence.append(sampled.token_ids[place], logprobs, sampled.traces[place], sampled.masks[place])
            if sequence.finish_reason is None:
                running.append(row)
                self._unemitted.append(sequence)
            else:
                self._remove_finished(sequence)
        for group, results in searching.items():
            self._search(group, results)
        return running

    def _search(self, group: BeamGroup, results: Mapping[Sequence, RowLogprobs | LogitshipError]) -> None:
        """Continue, branch or drop the beams of a request. A beam whose tokens are all masked is dropped."""
        faults = {sequence: fault for sequence, fault in results.items() if isinstance(fault, LogitshipError)}
        for sequence, fault in faults.items():
            if not isinstance(fault, NoTokenLeftError):
                self._end_with_fault(sequence, fault)
                return
        try:
            step = group.advance({one: result for one, result in results.items() if isinstance(result, RowLogprobs)})
        except ProcessorFault as fault:
            self._end_with_fault(group.lead, fault)
            return
        for beam in step.dropped:
            self._remove(beam)
        for source, beam in step.branched:
            self._scheduler.branch(source, beam)
        if group.has_answer and group.is_final:
            self._end_search(group)
        elif group.is_final:
            self._end_with_fault(group.lead, next(iter(faults.values())))

    def _finish_prompt_only(self, plan: Plan) -> None:
        """Finish the sequences of which only the prompt was to be computed."""
        with self._clock.deliver:
            for chunk in plan.prefill:
                if not chunk.sequence.samples and not chunk.sequence.prefilling:
                    self._end(chunk.sequence, FinishReason("length"))

    def _end_with_fault(self, sequence: Sequence, fault: Exception) -> None:
        if isinstance(fault, NonFiniteLogitsError):
            self._wipe(sequence)
        self._end(sequence, FinishReason("abort", error=request_error(fault)))

    def _end_all_running(self) -> None:
        self._batch.clear()
        for sequence in list(self._scheduler.running):
            if sequence.slot is not None:  # None if it ended with the other beams of its request
                self._wipe(sequence)
                self._end(sequence, FinishReason("abort", error=INTERNAL_ERROR))

    def _wipe(self, sequence: Sequence) -> None:
        """Zero the sequence's keys and values: where logits are not finite, these may not be finite either."""
        assert sequence.slot is not None
        self._runner.cache.wipe(sequence.slot, sequence.num_computed + self._scheduler.most_tokens)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if isinstance(sequence, Beam):
            self._end_search(sequence.group, reason)
            return
        sequence.finish(reason)
        self._remove_finished(sequence)

    def _end_search(self, group: BeamGroup, reason: FinishReason | None = None) -> None:
        """End a beam search: with its answer, or with `reason`. Does nothing if it has ended."""
        if group.is_answered:
            return
        for beam in self._scheduler.matching(lambda sequence: sequence.lead is group.lead):
            self._remove(beam)
        self._scheduler.free_slots(group)
        group.finish(reason)
        self._on_finished(group.lead)

    def _remove_finished(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self._on_finished(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._batch:
            self._batch.remove(sequence)
        for use in uses_of(sequence.sampling_params):
            use.drop_fork()
        self._scheduler.remove(sequence)


def _public(record: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(record.token_id, record.logprob, record.rank, record.top, record.requested)
