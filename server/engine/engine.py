"""The engine: one step at a time, on one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from logitship.client.errors import LogitshipError, ProcessorFault
from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.guarded_processor import BatchProcessorFault
from logitship.sampler.ops.logprobs import RowLogprobs, token_logprobs
from logitship.sampler.processors.processor_use import uses_of
from logitship.sampler.processors.row_order import adjacent_swaps, group_key
from logitship.sampler.sampler import NonFiniteLogitsError, NoTokenLeftError, Sampler, SamplerOutput
from logitship.server.metrics.step_clock import StepClock
from logitship.server.model.model_runner import ModelRunner
from logitship.server.model.prefix_cache import PrefixCacheStats
from logitship.server.requests.messages import FinishReason, RequestError, TokenLogprobs
from logitship.server.requests.sequence import Sequence

from .beam_group import BeamGroup
from .forward_pass import StepLogits, forward, prompt_logprob_offsets
from .scheduler import Plan, Scheduler

logger = logging.getLogger(__name__)

INTERNAL_ERROR = RequestError("InternalServerError", "the engine failed while it ran this request", 500)


class Engine:
    """Continuous batching: sequences join and leave between steps.

    Not safe to use from several threads: `EngineThread` owns it.

    Args:
        on_finished: told of each sequence that ended, whatever the reason, after its last chunk; of the beams of a
            search, of the first alone, when the search has ended.
        clock: counts where the time of a step goes.

    Attributes:
        num_steps: computed so far.
        num_drafted: tokens that were computed before they were drawn, so far.
        num_accepted: those of them that were drawn.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        batch: PersistentBatch[Sequence],
        on_finished: Callable[[Sequence], None],
        clock: StepClock | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._batch = batch
        self._on_finished = on_finished
        self._clock = clock or StepClock()
        self.num_steps = self.num_drafted = self.num_accepted = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._scheduler.waiting)

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        self._scheduler.waiting.extend(sequences)

    def abort(self, wanted: Callable[[Sequence], bool]) -> None:
        """End the sequences that fit, now: their rows are free in the next step."""
        for sequence in self._scheduler.matching(wanted):
            self._end(sequence, FinishReason("abort"))

    def clear_prefixes(self) -> None:
        """Forget what earlier sequences began with."""
        self._scheduler.prefixes.clear()

    @property
    def prefix_stats(self) -> PrefixCacheStats:
        """Of the cache of that."""
        return self._scheduler.prefixes.stats()

    def step(self) -> bool:
        """Compute one step. A failure ends the sequences that ran, and never the engine.

        Returns:
            False if there was nothing to do.
        """
        began, accepted_before = time.perf_counter(), self.num_accepted
        with self._clock.schedule:
            plan = self._scheduler.schedule()
        if not plan:
            return False
        try:
            with self._clock.batch_update:
                self._join_batch(plan)
                self._keep_groups_adjacent()
                self._sampler.update_state(self._batch.commit())
            with self._clock.forward:
                logits = forward(self._runner, plan, self._batch.members)
            with self._clock.deliver:
                self._take_prompt_logprobs(plan, logits.prompt)
                self._advance(plan)
                self._scheduler.share_prompts()  # before a sequence may end, and its slot with it
                self._draw(plan, logits)
                self._end_without_draw(plan)
        except Exception:  # whatever a step raises, the engine goes on
            rids = sorted({sequence.rid for sequence in self._scheduler.running})
            logger.exception("a step failed: its requests end with an error", extra={"fields": {"request_ids": rids}})
            self._end_all_running()
        self.num_steps += 1
        self._scheduler.took(plan, self.num_accepted - accepted_before, time.perf_counter() - began)
        return True

    def _join_batch(self, plan: Plan) -> None:
        """A sequence takes a row of the batch in the step that draws its first token; a new beam, in its first step."""
        for chunk in plan.chunks:
            if chunk.draws and chunk.sequence not in self._batch:
                self._batch.add(chunk.sequence)

    def _keep_groups_adjacent(self) -> None:
        """Reorder the rows, so that each processor gets its own as a view of the logits, not as a copy."""
        if not self._batch.changed:
            return  # they are adjacent since the last change
        self._batch.condense()
        keys = [group_key(sequence.sampling_params) for sequence in self._batch.members]
        if any(keys):
            for row_1, row_2 in adjacent_swaps(keys):
                self._batch.swap(row_1, row_2)

    def _draw(self, plan: Plan, logits: StepLogits) -> None:
        """Draw each row's next token, and those after it for as long as they are what was drafted."""
        members = self._batch.members
        self._clock.num_rows = len(members)
        rows = self._deliver(members, range(len(members)), self._sample(logits.rows))
        drafts = {chunk.sequence: chunk.drafts for chunk in plan.decode}
        self.num_drafted += sum(map(len, drafts.values()))
        for depth, of_drafts in enumerate(logits.drafts):
            rows = [
                row
                for row in rows
                if len(drafts.get(members[row], ())) > depth
                and drafts[members[row]][depth] == members[row].output_token_ids[-1]
            ]
            if not rows:
                return
            self.num_accepted += len(rows)
            for row in rows:
                members[row].num_computed += 1
            self._sampler.update_state(None)
            rows = self._deliver(members, rows, self._sample(of_drafts.of(rows), rows))

    def _sample(self, logits: torch.Tensor, rows: list[int] | None = None) -> SamplerOutput:
        with self._clock.sample:
            return self._sampler.sample(logits, rows)

    def _take_prompt_logprobs(self, plan: Plan, logits: torch.Tensor) -> None:
        first = 0
        for chunk in plan.prefill:
            sequence = chunk.sequence
            offsets = prompt_logprob_offsets(chunk)
            top = sequence.sampling_params.prompt_logprobs
            if top is None:
                continue
            if sequence.num_computed == 0 and sequence.sampling_params.prompt_logprobs_start == 0:
                sequence.prompt_logprobs.append(TokenLogprobs(sequence.prompt_token_ids[0], None, None))
            targets = [sequence.prompt_token_ids[sequence.num_computed + offset + 1] for offset in offsets]
            records = token_logprobs(logits[first : first + len(offsets)], targets, [top] * len(offsets))
            sequence.prompt_logprobs += [_public(record) for record in records]
            first += len(offsets)

    def _advance(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            chunk.sequence.num_computed += len(chunk.token_ids)

    def _deliver(self, members: list[Sequence], rows: Iterable[int], drawn: SamplerOutput) -> list[int]:
        """Give each of the rows its token; those that end leave the batch.

        Returns:
            The rows that go on.
        """
        faults = dict(drawn.faults)
        going_on = []
        searching: dict[BeamGroup, dict[Sequence, RowLogprobs | LogitshipError]] = {}
        for place, row in enumerate(rows):
            sequence = members[row]
            if sequence.beams is not None:
                result = faults.get(place) or drawn.logprobs[place]
                assert result is not None
                searching.setdefault(sequence.beams, {})[sequence] = result
                continue
            if place in faults:
                self._end_with_fault(sequence, faults[place])
                continue
            record = drawn.logprobs[place]
            sequence.append(drawn.token_ids[place], _public(record) if record else None, drawn.traces[place])
            if sequence.finish_reason is None:
                going_on.append(row)
            else:
                self._leave(sequence)
        for beams, results in searching.items():
            self._search(beams, results)
        return going_on

    def _search(self, beams: BeamGroup, results: Mapping[Sequence, RowLogprobs | LogitshipError]) -> None:
        """Let the beams of a request go on, branch off or be given up. One that no token is left to is given up."""
        faults = {sequence: fault for sequence, fault in results.items() if isinstance(fault, LogitshipError)}
        for sequence, fault in faults.items():
            if not isinstance(fault, NoTokenLeftError):
                self._end_with_fault(sequence, fault)
                return
        try:
            step = beams.advance({one: result for one, result in results.items() if isinstance(result, RowLogprobs)})
        except ProcessorFault as fault:
            self._end_with_fault(beams.lead, fault)
            return
        for sequence in step.given_up:
            self._retire(sequence)
        for source, sequence in step.branched:
            self._scheduler.branch(source, sequence)
        if beams.has_answer and beams.is_final:
            self._end_beams(beams)
        elif beams.is_final:
            self._end_with_fault(beams.lead, next(iter(faults.values())))

    def _end_without_draw(self, plan: Plan) -> None:
        """End the sequences that are done with their prompt and want nothing more."""
        for chunk in plan.prefill:
            if not chunk.sequence.draws and not chunk.sequence.prefilling:
                self._end(chunk.sequence, FinishReason("length"))

    def _end_with_fault(self, sequence: Sequence, fault: Exception) -> None:
        if isinstance(fault, ProcessorFault):
            error = RequestError(
                "ProcessorFault", fault.message, 400, fault.traceback, fault.digest, fault.name, fault.kind
            )
        else:
            status_code = 500 if isinstance(fault, BatchProcessorFault) else 400
            error = RequestError(type(fault).__name__, str(fault), status_code)
        if isinstance(fault, NonFiniteLogitsError):
            self._wipe(sequence)
        self._end(sequence, FinishReason("abort", error=error))

    def _end_all_running(self) -> None:
        self._batch.clear()
        for sequence in list(self._scheduler.running):
            if sequence.slot is not None:  # it has none if it ended with the other beams of its request
                self._wipe(sequence)
                self._end(sequence, FinishReason("abort", error=INTERNAL_ERROR))

    def _wipe(self, sequence: Sequence) -> None:
        """Where the logits are not finite, the sequence's keys and values may not be either."""
        assert sequence.slot is not None
        self._runner.cache.wipe(sequence.slot, sequence.num_computed + self._scheduler.most_tokens)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.beams is not None:
            self._end_beams(sequence.beams, reason)
            return
        sequence.finish(reason)
        self._leave(sequence)

    def _end_beams(self, beams: BeamGroup, reason: FinishReason | None = None) -> None:
        """End a search, with its answer or for another reason. Harmless where it has ended."""
        if beams.is_over:
            return
        for sequence in self._scheduler.matching(lambda sequence: sequence.beams is beams):
            self._retire(sequence)
        self._scheduler.free_slots(beams)
        beams.finish(reason)
        self._on_finished(beams.lead)

    def _leave(self, sequence: Sequence) -> None:
        self._retire(sequence)
        self._on_finished(sequence)

    def _retire(self, sequence: Sequence) -> None:
        if sequence in self._batch:
            self._batch.remove(sequence)
        for use in uses_of(sequence.sampling_params):
            use.drop_fork()
        self._scheduler.remove(sequence)


def _public(record: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(record.token_id, record.logprob, record.rank, record.top)
