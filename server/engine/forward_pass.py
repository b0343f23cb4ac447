"""The forward pass of a planned step, and what of its logits is whose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from logitship.server.model.model_runner import Chunk, ModelRunner
from logitship.server.requests.sequence import Sequence

from .plan import Plan, ScheduledChunk


@dataclass(frozen=True)
class DraftLogits:
    """What a forward pass gives for the drafted tokens of one depth.

    Attributes:
        rows: the rows of the batch that have a draft so deep, ascending.
        logits: float32 [rows, vocab].
    """

    rows: list[int]
    logits: torch.Tensor

    def of(self, rows: list[int]) -> torch.Tensor:
        """Those of some of the rows; may be edited in place."""
        if rows == self.rows:
            return self.logits
        return self.logits[[self.rows.index(row) for row in rows]]


@dataclass(frozen=True)
class StepLogits:
    """What a forward pass gives: float32 [any, vocab] each.

    Attributes:
        rows: of the batch's rows, in their order.
        drafts: of the drafted tokens, by depth.
        prompt: of the prompt tokens whose log-probabilities are asked for.
    """

    rows: torch.Tensor
    drafts: list[DraftLogits]
    prompt: torch.Tensor


def forward(runner: ModelRunner, plan: Plan, members: list[Sequence]) -> StepLogits:
    """Compute the tokens of a plan.

    Args:
        members: the sequences that draw, in row order.
    """
    places = _Places(plan)
    rows = [places.last[sequence] for sequence in members]
    drafts = places.drafts(members)
    keep = [*rows, *(place for depth in drafts for _, place in depth), *places.prompt]
    logits = runner.forward(_chunks(plan.decode), _chunks(plan.prefill), keep)
    of_rows, *of_drafts, of_prompt = torch.split(logits, [len(rows), *map(len, drafts), len(places.prompt)])
    return StepLogits(
        of_rows,
        [DraftLogits([row for row, _ in depth], of_depth) for depth, of_depth in zip(drafts, of_drafts, strict=True)],
        of_prompt,
    )


def prompt_logprob_offsets(chunk: ScheduledChunk) -> range:
    """Which tokens of a chunk are followed by a prompt token whose log-probability is wanted."""
    sequence = chunk.sequence
    if sequence.sampling_params.prompt_logprobs is None or not sequence.prefilling:
        return range(0)
    begin = max(0, sequence.sampling_params.prompt_logprobs_start - 1 - sequence.num_computed)
    end = min(len(chunk.token_ids), sequence.num_prompt - 1 - sequence.num_computed)
    return range(begin, end)


class _Places:
    """Where tokens stand in the forward pass of a plan.

    Attributes:
        last: of each sequence, the token that its next one is drawn behind.
        prompt: the tokens that prompt log-probabilities are behind.
    """

    def __init__(self, plan: Plan) -> None:
        self.last: dict[Sequence, int] = {}
        self.prompt: list[int] = []
        self._num_drafts: dict[Sequence, int] = {}
        place = 0
        for chunk in plan.chunks:
            self.prompt += [place + offset for offset in prompt_logprob_offsets(chunk)]
            place += len(chunk.token_ids)
            self.last[chunk.sequence] = place - 1
            self._num_drafts[chunk.sequence] = len(chunk.drafts)
            place += len(chunk.drafts)

    def drafts(self, members: list[Sequence]) -> list[list[tuple[int, int]]]:
        """By depth: the rows that have a draft so deep, each with its place."""
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
