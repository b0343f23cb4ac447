"""The plan of a step, its forward pass, and the assignment of the logits to rows, drafts and prompts."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from logitship.sampler.processors.processor_groups import uses_of
from logitship.server.model.model_runner import Chunk, ModelRunner, OutputLogits
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.forced_runs import ForcedRun

MIN_PROMPT_COST = 8
"""Tokens that a shorter chunk of a prompt counts as in a step: each has its own attention, and most of them are sampled
and decode in the next steps."""

SEQUENCE_COST = 450
"""Cost of a sequence without its positions, in positions: 2.7 ms beside 6 microseconds, a model of 135 million
parameters on two cores."""


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one sequence that the next step computes.

    Attributes:
        token_ids: prompt tokens, or the last sampled token.
        drafts: tokens after them that are computed in the same forward pass.
        certain: indices of the drafts that need not be verified, because they are certain if those before them are
            accepted.
        is_forced: True if the drafts are a forced run, see `forced_runs`; False if they are guessed by prompt lookup.
    """

    sequence: Sequence
    token_ids: list[int]
    drafts: list[int] = field(default_factory=list)
    certain: Collection[int] = ()
    is_forced: bool = False

    def needs_few_logits(self, depth: int) -> bool:
        """Return whether only some tokens' logits are needed behind the first `depth` drafts.

        That is so if the token after them is certain, or if a mask decides it: then masked tokens make no difference.
        """
        if not self.is_forced or depth >= len(self.drafts) or self.sequence.sampling_params.has_records:
            return False
        return depth in self.certain or all(use.processor.is_mask for use in uses_of(self.sequence.sampling_params))

    @property
    def prompt_cost(self) -> int:
        """Prompt tokens that the chunk counts as in a step."""
        return max(MIN_PROMPT_COST, len(self.token_ids))

    @property
    def samples(self) -> bool:
        """True if the step samples a token for this sequence."""
        return self.sequence.samples and self.sequence.num_computed + len(self.token_ids) >= self.sequence.num_prompt


def positions(sequences: Iterable[Sequence]) -> int:
    """Return what a step with these sequences costs, in positions of their keys and values."""
    return sum(SEQUENCE_COST + sequence.num_computed for sequence in sequences)


@dataclass(frozen=True)
class Plan:
    """One step. False if it has nothing to compute.

    Attributes:
        decode: one token of each decoding sequence, with its drafts.
        prefill: chunks of prompts.
        started_at: `time.perf_counter()` when scheduling began.
        idle: running sequences of which nothing is computed. They have no row of the batch in this step.
    """

    decode: list[ScheduledChunk]
    prefill: list[ScheduledChunk]
    started_at: float
    idle: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All chunks, in the order of the forward pass."""
        return [*self.decode, *self.prefill]

    @property
    def prompt_cost(self) -> int:
        """Prompt tokens of the step. Short prompts count as more."""
        return sum(chunk.prompt_cost for chunk in self.prefill)

    def with_forced(self, runs: Mapping[Sequence, ForcedRun]) -> Plan:
        """Return the plan with the forced runs of some sequences, in place of what was guessed for them."""

        def forced(chunk: ScheduledChunk) -> ScheduledChunk:
            run = runs.get(chunk.sequence)
            return replace(chunk, drafts=run.token_ids, certain=run.certain, is_forced=True) if run else chunk

        return replace(self, decode=list(map(forced, self.decode)), prefill=list(map(forced, self.prefill)))


class StepLogits:
    """Logits of a forward pass.

    Args:
        complete: float32 [n, vocab]: all logits of the first kept tokens.
        output: computes those of others.
        places: place of a row's token among the kept ones, by row in ascending order, for each depth: number of draft
            tokens before.
        num_prompt: number of complete ones, the last, that give log-probabilities of prompts.
    """

    def __init__(
        self, complete: torch.Tensor, output: OutputLogits, places: list[dict[int, int]], num_prompt: int
    ) -> None:
        self._complete, self.prompt = torch.split(complete, [len(complete) - num_prompt, num_prompt])
        self._output = output
        self._places = places

    @property
    def depths(self) -> range:
        """Numbers of draft tokens with a row."""
        return range(len(self._places))

    def incomplete(self, depth: int, rows: Iterable[int]) -> list[int]:
        """Return those of the rows of a depth whose logits are computed when they are asked for."""
        return [row for row in rows if self._places[depth][row] >= len(self._complete)]

    def single(self, depth: int, token_ids: Mapping[int, abc.Sequence[int]]) -> dict[int, list[float]]:
        """Return the logits of some tokens of incomplete rows of a depth, by row."""
        values = iter(self._some(depth, token_ids).tolist())
        return {row: list(islice(values, len(tokens))) for row, tokens in token_ids.items()}

    def _some(self, depth: int, token_ids: Mapping[int, abc.Sequence[int]]) -> torch.Tensor:
        """Return the logits of some tokens of incomplete rows of a depth, float32 [tokens], row by row."""
        places = [self._places[depth][row] for row, tokens in token_ids.items() for _ in tokens]
        flat = [token for tokens in token_ids.values() for token in tokens]
        return self._output.some(torch.tensor(places), torch.tensor(flat))

    def of(self, depth: int, rows: abc.Sequence[int], few: Mapping[int, abc.Sequence[int]]) -> torch.Tensor:
        """Return the logits of some rows of a depth, once; may be edited in place.

        Args:
            depth: number of draft tokens before.
            rows: rows of the batch, ascending.
            few: for some incomplete rows, the tokens that are needed. The others are -inf.

        Returns:
            float32 [rows, vocab].
        """
        places = [self._places[depth][row] for row in rows]
        if not self.incomplete(depth, rows):
            first = min(places, default=0)
            is_slice = places == [*range(first, first + len(places))]
            return self._complete[first : first + len(places)] if is_slice else self._complete[places]
        logits = self._complete.new_full((len(rows), self._complete.shape[1]), -math.inf)
        for row, place, out in zip(rows, places, logits, strict=True):
            if place < len(self._complete):
                out.copy_(self._complete[place])
            elif row not in few:
                out.copy_(self._output.rows(place, place + 1)[0])
        few = {row: few[row] for row in rows if few.get(row)}
        if few:
            numbers = {row: number for number, row in enumerate(rows)}
            of_row = torch.tensor([numbers[row] for row, tokens in few.items() for _ in tokens])
            columns = torch.tensor([token for tokens in few.values() for token in tokens])
            logits[of_row, columns] = self._some(depth, few)
        return logits


def forward(runner: ModelRunner, plan: Plan, members: list[Sequence]) -> StepLogits:
    """Compute the tokens of a plan.

    Args:
        runner: the model.
        plan: the plan.
        members: the sequences that sample, in row order.
    """
    positions = _LogitPositions(plan)
    depths = positions.depths(members)
    complete, incomplete = (
        [
            (depth, row, position)
            for depth, rows in enumerate(depths)
            for row, position in rows.items()
            if positions.chunk_of(members[row]).needs_few_logits(depth) == is_incomplete
        ]
        for is_incomplete in (False, True)
    )
    order = [*complete, *((-1, -1, position) for position in positions.prompt), *incomplete]
    num_complete = len(order) - len(incomplete)
    keep = [position for _, _, position in order]
    logits, output = runner.forward(_chunks(plan.decode), _chunks(plan.prefill), keep, num_complete)
    places: list[dict[int, int]] = [{} for _ in depths]
    for place, (depth, row, _) in enumerate(order):
        if depth >= 0:
            places[depth][row] = place
    return StepLogits(logits, output, places, len(positions.prompt))


def prompt_logprob_offsets(chunk: ScheduledChunk) -> range:
    """Return the offsets of a chunk's tokens that are followed by a prompt token with requested log-probabilities."""
    sequence = chunk.sequence
    if sequence.sampling_params.prompt_logprobs is None or not sequence.prefilling:
        return range(0)
    begin = max(0, sequence.sampling_params.prompt_logprobs_start - 1 - sequence.num_computed)
    end = min(len(chunk.token_ids), sequence.num_prompt - 1 - sequence.num_computed)
    return range(begin, end)


class _LogitPositions:
    """Positions of tokens in the forward pass of a plan.

    Attributes:
        last: the token of each sequence whose logits its next token is sampled from.
        prompt: the tokens whose logits give prompt log-probabilities.
    """

    def __init__(self, plan: Plan) -> None:
        self.last: dict[Sequence, int] = {}
        self.prompt: list[int] = []
        self._chunks: dict[Sequence, ScheduledChunk] = {}
        position = 0
        for chunk in plan.chunks:
            self.prompt += [position + offset for offset in prompt_logprob_offsets(chunk)]
            position += len(chunk.token_ids)
            self.last[chunk.sequence] = position - 1
            self._chunks[chunk.sequence] = chunk
            position += len(chunk.drafts)

    def chunk_of(self, sequence: Sequence) -> ScheduledChunk:
        """Return the chunk of a sequence."""
        return self._chunks[sequence]

    def depths(self, members: list[Sequence]) -> list[dict[int, int]]:
        """Return the positions of the last tokens by row, then behind one draft, and so on."""
        counts = [len(self._chunks[sequence].drafts) for sequence in members]
        return [
            {row: self.last[members[row]] + depth for row, count in enumerate(counts) if count >= depth}
            for depth in range(max(counts, default=0) + 1)
        ]


def _chunks(scheduled: list[ScheduledChunk]) -> list[Chunk]:
    chunks = []
    for chunk in scheduled:
        assert chunk.sequence.slot is not None
        chunks.append(Chunk(chunk.sequence.slot, chunk.sequence.num_computed, [*chunk.token_ids, *chunk.drafts]))
    return chunks
