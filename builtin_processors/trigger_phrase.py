"""Writes a phrase at a token, or after a time. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from logitship.builtin_processors.parts.enforce import argmax_is_among
from logitship.builtin_processors.parts.phrase_processor import (
    PhraseParams,
    PhraseProcessor,
    Phrases,
    PhraseStep,
    Times,
)
from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.text_tokens import TokenOfText

from .params import Expects


class TriggerPhraseParams(PhraseParams):
    """See `TriggerPhraseLogitsProcessor`."""

    trigger_token_phrase: TokenOfText | None = None
    """The token that triggers the phrase. null: none."""
    trigger_time: Annotated[
        Annotated[float, Field(gt=0)] | None, Expects("a number of seconds greater than 0, or null")
    ] = None
    """The seconds after which the phrase is triggered. null: never."""
    trigger_count: Times = 1
    """Number of times to write the phrase."""
    trigger_after: Annotated[bool, Expects("true or false")] = False
    """true: write the phrase after the token sampled in the triggering step; false: instead of it."""

    @model_validator(mode="after")
    def _has_a_trigger(self) -> Self:
        if self.trigger_token_phrase is None and self.trigger_time is None:
            raise ValueError(
                "trigger_token_phrase, trigger_time: one of them is needed, or nothing triggers the phrase"
            )
        return self


@dataclass(frozen=True)
class Triggers:
    """The rows' triggers.

    Attributes:
        tokens: int64 [rows, 1]; -1 for none.
        seconds: float64 [rows]; inf for none.
        after: bool [rows].
    """

    tokens: torch.Tensor
    seconds: torch.Tensor
    after: torch.Tensor


class TriggerPhraseLogitsProcessor(PhraseProcessor):
    """Writes `phrase` when a step's argmax is the trigger token, or `trigger_time` has passed; `trigger_count` times.

    Nothing triggers the phrase while it is written. The time counts from the sequence's first step, and again from the
    end of the phrase. Each sequence has its own timer; in the original, all rows of a call share one.

    Args:
        clock: a monotonic clock, in seconds.
    """

    name = "trigger_phrase"
    Params = TriggerPhraseParams
    example: ClassVar[Mapping[str, Any]] = {"phrase": "ab", "trigger_token_phrase": "a"}

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock

    def initial_state(self, prepared: TriggerPhraseParams) -> Sequence[float]:
        """Return the index in the phrase (-1 while waiting), the remaining count, and the time since it waits."""
        return (-1, prepared.trigger_count, self._clock())

    def constants(self, rows: Sequence[TriggerPhraseParams], device: torch.device) -> Triggers:
        """Return the rows' triggers."""
        tokens = (-1 if row.trigger_token_phrase is None else row.trigger_token_phrase for row in rows)
        seconds = (math.inf if row.trigger_time is None else row.trigger_time for row in rows)
        return Triggers(
            tokens=to_device(tokens, np.int64, device).unsqueeze(1),
            seconds=to_device(seconds, np.float64, device),
            after=to_device((row.trigger_after for row in rows), np.bool_, device),
        )

    def advance(self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: Triggers) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        now = self._clock()
        indices, left, since = state.unbind(1)
        waits = indices < 0
        is_time = now - since > constants.seconds
        triggered = waits & (left > 0) & (is_time | argmax_is_among(logits, constants.tokens))
        forced = ~waits | (triggered & ~constants.after)
        indices = indices.clamp(min=0)
        following = torch.where(waits & ~triggered, -1.0, indices + forced)
        written = following == phrases.lengths
        state = torch.stack(
            (
                torch.where(written, -1.0, following),
                torch.where(written, left - 1, left),
                torch.where(written, now, since),
            ),
            dim=1,
        )
        return PhraseStep(forced, indices, state)
