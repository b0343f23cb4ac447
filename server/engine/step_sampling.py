"""The tokens of a step, from the logits of its forward pass: rows are sampled, and their drafts verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from logitship.sampler.drafter import RemainingTokens
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.server.metrics.step_clock import StepClock

from .forward_pass import ScheduledChunk, StepLogits


class StepSampling:
    """Samples the rows of one step, one depth at a time: at depth d, those behind d accepted draft tokens.

    Args:
        sampler: samples the tokens that a few logits do not determine.
        clock: times the phases of the step.
        logits: the logits of the step.
        drafts: the draft tokens by row.

    Attributes:
        drafts: the draft tokens by row.
        num_accepted: accepted draft tokens by row.
    """

    def __init__(
        self, sampler: Sampler, clock: StepClock, logits: StepLogits, drafts: Mapping[int, ScheduledChunk]
    ) -> None:
        self._sampler = sampler
        self._clock = clock
        self._logits = logits
        self.drafts = drafts
        self.num_accepted = Counter[int]()

    def sample(self, depth: int, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], SamplerOutput]]:
        """Determine the next tokens of some rows: from a few logits if these suffice, by sampling otherwise.

        A row is sampled nevertheless if one of these logits is not finite, which may be an error.

        Args:
            depth: number of draft tokens that the rows have taken in this step; 0 for all rows of the batch.
            rows: the rows, ascending.

        Yields:
            Some of the rows, and their tokens, to be appended before the next ones are sampled.
        """
        remaining = self._remaining(depth, rows)
        tokens = self._largest(depth, remaining)
        if tokens:
            self._sampler.skip(tokens)
            nothing = [None] * len(tokens)
            yield [*tokens], SamplerOutput([*tokens.values()], [*nothing], [], [*nothing], [*nothing])
        others = [row for row in rows if row not in tokens]
        if others:
            with self._clock.forward:
                logits = self._logits.of(depth, others, {row: each.token_ids for row, each in remaining.items()})
            with self._clock.sample:
                output = self._sampler.sample(logits, others if depth or tokens else None)
            yield others, output

    def accept(self, depth: int, rows: Sequence[int]) -> list[int]:
        """Return those of the rows, ascending, whose next draft token is the one that was sampled.

        Args:
            depth: number of draft tokens before it.
            rows: rows that have their next token and are still running.
        """
        accepted = sorted(row for row in rows if row in self.drafts and _is_accepted(self.drafts[row], depth))
        self.num_accepted.update(accepted)
        return accepted

    def _remaining(self, depth: int, rows: Sequence[int]) -> dict[int, RemainingTokens]:
        """Return the tokens that may be sampled in the rows whose logits are not all computed, if they are few."""
        incomplete = self._logits.incomplete(depth, rows)
        if not incomplete:
            return {}
        certain = {row for row in incomplete if depth in self.drafts[row].certain}
        with self._clock.sample:
            remaining = self._sampler.drafter.remaining([row for row in incomplete if row not in certain])
        return remaining | {row: RemainingTokens([self.drafts[row].drafts[depth]], True) for row in certain}

    def _largest(self, depth: int, remaining: Mapping[int, RemainingTokens]) -> dict[int, int]:
        """Return the tokens that `Sampler.sample` would return, for the rows of which a few logits determine it."""
        token_ids = {row: each.token_ids for row, each in remaining.items() if each.takes_largest and each.token_ids}
        if not token_ids:
            return {}
        with self._clock.forward:
            logits = self._logits.single(depth, token_ids)
        found = {row: remaining[row].largest(values) for row, values in logits.items()}
        return {row: token for row, token in found.items() if token is not None}


def _is_accepted(chunk: ScheduledChunk, depth: int) -> bool:
    return chunk.drafts[depth : depth + 1] == chunk.sequence.output_token_ids[-1:]
