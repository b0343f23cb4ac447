"""The plan of a step, its forward pass, and the assignment of the logits to rows, drafts and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from logitship.server.model.model_runner import Chunk, ModelRunner
from logitship.server.requests.sequence import Sequence


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one sequence that the next step computes.

    Attributes:
        token_ids: prompt tokens, or the last sampled token.
        drafts: draft tokens that are verified in the same forward pass.
    """

    sequence: Sequence
    token_ids: list[int]
    drafts: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """True if the step samples a token for this sequence."""
        return self.sequence.samples and self.sequence.num_computed + len(self.token_ids) >= self.sequence.num_prompt


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


@dataclass(frozen=True)
class DraftLogits:
    """Logits behind the draft tokens of one depth.

    Attributes:
        rows: rows of the batch that have a draft of that depth, ascending.
        logits: float32 [rows, vocab].
    """

    rows: list[int]
    logits: torch.Tensor

    def for_rows(self, rows: list[int]) -> torch.Tensor:
        """Return the logits of some of the rows; may be edited in place."""
        if rows == self.rows:
            return self.logits
        return self.logits[[self.rows.index(row) for row in rows]]


@dataclass(frozen=True)
class StepLogits:
    """Logits of a forward pass, each tensor float32 [any, vocab].

    Attributes:
        rows: the batch's rows, in row order.
        drafts: the draft tokens, by depth.
        prompt: the prompt tokens followed by one with requested log-probabilities.
    """

    rows: torch.Tensor
    drafts: list[DraftLogits]
    prompt: torch.Tensor


def forward(runner: ModelRunner, plan: Plan, members: list[Sequence]) -> StepLogits:
    """Compute the tokens of a plan.

    Args:
        runner: the model.
        plan: the plan.
        members: the sequences that sample, in row order.
    """
    positions = _LogitPositions(plan)
    rows = [positions.last[sequence] for sequence in members]
    drafts = positions.drafts(members)
    keep = [*rows, *(position for depth in drafts for _, position in depth), *positions.prompt]
    logits = runner.forward(_chunks(plan.decode), _chunks(plan.prefill), keep)
    row_logits, *draft_logits, prompt_logits = torch.split(
        logits, [len(rows), *map(len, drafts), len(positions.prompt)]
    )
    return StepLogits(
        row_logits,
        [DraftLogits([row for row, _ in depth], part) for depth, part in zip(drafts, draft_logits, strict=True)],
        prompt_logits,
    )


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
        self._num_drafts: dict[Sequence, int] = {}
        position = 0
        for chunk in plan.chunks:
            self.prompt += [position + offset for offset in prompt_logprob_offsets(chunk)]
            position += len(chunk.token_ids)
            self.last[chunk.sequence] = position - 1
            self._num_drafts[chunk.sequence] = len(chunk.drafts)
            position += len(chunk.drafts)

    def drafts(self, members: list[Sequence]) -> list[list[tuple[int, int]]]:
        """Return (row, position) of the draft tokens, by depth."""
        counts = [self._num_drafts[sequence] for sequence in members]
        return [
            [(row, self.last[members[row]] + depth) for row, count in enumerate(counts) if count >= depth]
            for depth in range(1, max(counts, default=0) + 1)
        ]


def _chunks(scheduled: list[ScheduledChunk]) -> list[Chunk]:
    chunks = []
    for chunk in scheduled:
        assert chunk.sequence.slot is not None
        chunks.append(Chunk(chunk.sequence.slot, chunk.sequence.num_computed, [*chunk.token_ids, *chunk.drafts]))
    return chunks
