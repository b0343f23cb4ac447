"""The engine: one step at a time, on one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.guarded_processor import BatchProcessorFault
from logitship.sampler.ops.logprobs import RowLogprobs, token_logprobs
from logitship.sampler.persistent_batch import PersistentBatch
from logitship.sampler.row_order import adjacent_swaps, group_key
from logitship.sampler.sampler import NonFiniteLogitsError, Sampler, SamplerOutput

from .messages import FinishReason, RequestError, TokenLogprobs
from .model_runner import Chunk, ModelRunner
from .scheduler import Plan, ScheduledChunk, Scheduler
from .sequence import Sequence

logger = logging.getLogger(__name__)

INTERNAL_ERROR = RequestError("InternalServerError", "the engine failed while it ran this request", 500)


class Engine:
    """Continuous batching: sequences join and leave between steps.

    Not safe to use from several threads: `EngineThread` owns it.

    Args:
        on_finished: told of each sequence that ended, whatever the reason, after its last chunk.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        batch: PersistentBatch[Sequence],
        on_finished: Callable[[Sequence], None],
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._batch = batch
        self._on_finished = on_finished
        self.num_steps = 0

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

    def step(self) -> bool:
        """Compute one step. A failure ends the sequences that ran, and never the engine.

        Returns:
            False if there was nothing to do.
        """
        plan = self._scheduler.schedule()
        if not plan:
            return False
        try:
            self._join_batch(plan)
            self._keep_groups_adjacent()
            self._sampler.update_state(self._batch.commit())
            logits = self._forward(plan)
            drawn = self._sampler.sample(logits[: len(self._batch)])
            self._take_prompt_logprobs(plan, logits[len(self._batch) :])
            self._advance(plan)
            self._deliver(drawn)
            self._end_without_draw(plan)
        except Exception:  # whatever a step raises, the engine goes on
            logger.exception("a step failed: its requests end with an error")
            self._end_all_running()
        self.num_steps += 1
        return True

    def _join_batch(self, plan: Plan) -> None:
        """A sequence takes a row of the batch in the step that draws its first token."""
        for chunk in plan.prefill:
            if chunk.draws:
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

    def _forward(self, plan: Plan) -> torch.Tensor:
        """Logits of the batch's rows, in row order, then those that prompt log-probabilities ask for."""
        last_token: dict[int, int] = {}
        prompt_tokens: list[int] = []
        position = 0
        for chunk in plan.chunks:
            prompt_tokens += [position + offset for offset in _prompt_logprob_offsets(chunk)]
            position += len(chunk.token_ids)
            last_token[id(chunk.sequence)] = position - 1
        rows = [last_token[id(sequence)] for sequence in self._batch.members]
        return self._runner.forward(_chunks(plan.decode), _chunks(plan.prefill), rows + prompt_tokens)

    def _take_prompt_logprobs(self, plan: Plan, logits: torch.Tensor) -> None:
        first = 0
        for chunk in plan.prefill:
            sequence = chunk.sequence
            offsets = _prompt_logprob_offsets(chunk)
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

    def _deliver(self, drawn: SamplerOutput) -> None:
        """Give each row its token; those that end leave the batch."""
        faults = dict(drawn.faults)
        for row, sequence in enumerate(self._batch.members):
            if row in faults:
                self._end_with_fault(sequence, faults[row])
                continue
            record = drawn.logprobs[row]
            sequence.append(drawn.token_ids[row], _public(record) if record else None)
            if sequence.finish_reason is not None:
                self._leave(sequence)

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
            self._wipe(sequence)
            self._end(sequence, FinishReason("abort", error=INTERNAL_ERROR))

    def _wipe(self, sequence: Sequence) -> None:
        """Where the logits are not finite, the sequence's keys and values may not be either."""
        assert sequence.slot is not None
        self._runner.cache.wipe(sequence.slot, sequence.num_computed + self._scheduler.chunked_prefill_size)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._batch:
            self._batch.remove(sequence)
        self._scheduler.remove(sequence)
        self._on_finished(sequence)


def _chunks(scheduled: list[ScheduledChunk]) -> list[Chunk]:
    chunks = []
    for chunk in scheduled:
        assert chunk.sequence.slot is not None
        chunks.append(Chunk(chunk.sequence.slot, chunk.sequence.num_computed, chunk.token_ids))
    return chunks


def _prompt_logprob_offsets(chunk: ScheduledChunk) -> range:
    """Which tokens of a chunk are followed by a prompt token whose log-probability is wanted."""
    sequence = chunk.sequence
    if sequence.sampling_params.prompt_logprobs is None or not sequence.prefilling:
        return range(0)
    begin = max(0, sequence.sampling_params.prompt_logprobs_start - 1 - sequence.num_computed)
    end = min(len(chunk.token_ids), sequence.num_prompt - 1 - sequence.num_computed)
    return range(begin, end)


def _public(record: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(record.token_id, record.logprob, record.rank, record.top)
