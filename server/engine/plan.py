"""The plan of a step: which tokens of which sequences are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    decode: list[ScheduledChunk]
    prefill: list[ScheduledChunk]
    started_at: float

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All chunks, in the order of the forward pass."""
        return [*self.decode, *self.prefill]
