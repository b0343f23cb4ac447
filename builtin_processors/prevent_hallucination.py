"""Writes a phrase when the model is unsure. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.phrase_processor import (
    PhraseParams,
    PhraseProcessor,
    Phrases,
    PhraseStep,
    Times,
)
from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.text_tokens import PhraseTokens

from .params import Expects

DEFAULT_PHRASE = "...I don't know actually.\n"


class PreventHallucinationParams(PhraseParams):
    """See `PreventHallucinationLogitsProcessor`."""

    phrase: PhraseTokens = Field(default=cast(Any, DEFAULT_PHRASE), validate_default=True)
    """The phrase to write."""
    minp: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")] = 0.4
    """A step is unsure if no token has at least this probability."""
    tolerate: Times = 1
    """Number of unsure steps to tolerate in total."""


class PreventHallucinationLogitsProcessor(PhraseProcessor):
    """Writes `phrase` once more than `tolerate` steps were unsure, then resets the count.

    A step is unsure if the highest probability of the row, before temperature, is below `minp`. The steps need not be
    consecutive. A phrase cannot begin in the step right after another one.
    """

    name = "prevent_hallucination"
    Params = PreventHallucinationParams
    example: ClassVar[Mapping[str, Any]] = {"phrase": "ab", "minp": 0.9, "tolerate": 2}

    def initial_state(self, prepared: PreventHallucinationParams) -> Sequence[float]:
        """Return the index in the phrase, and the number of unsure steps."""
        return (0, 0)

    def constants(self, rows: Sequence[PreventHallucinationParams], device: torch.device) -> list[torch.Tensor]:
        """Return `minp`, float32 [rows], and `tolerate`, float64 [rows]."""
        return [
            to_device((row.minp for row in rows), np.float32, device),
            to_device((row.tolerate for row in rows), np.float64, device),
        ]

    def advance(
        self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: list[torch.Tensor]
    ) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        minp, tolerate = constants
        indices, unsure = state.unbind(1)
        unsure = unsure + (logits.softmax(1).amax(1) < minp)
        forced = torch.where(indices == 0, unsure > tolerate, indices < phrases.lengths)
        written = indices >= phrases.lengths
        following = torch.stack((indices + forced, unsure), dim=1)
        return PhraseStep(forced, indices, following.masked_fill(written.unsqueeze(1), 0))
