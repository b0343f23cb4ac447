"""A phrase when the model is not sure. The behaviour is that of NVIDIA's logits-processor-zoo 0.2.1."""

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
    """What is written."""
    minp: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")] = 0.4
    """A step is unsure if no token's probability is at least this."""
    tolerate: Times = 1
    """How many unsure steps are let pass, all together."""


class PreventHallucinationLogitsProcessor(PhraseProcessor):
    """Writes `phrase` once more than `tolerate` steps were unsure, then counts anew.

    A step is unsure if the highest probability of the row, before the temperature, is below `minp`. The steps need not
    follow one another. The step after the phrase is never the first of a new one.
    """

    name = "prevent_hallucination"
    Params = PreventHallucinationParams
    example: ClassVar[Mapping[str, Any]] = {"phrase": "ab", "minp": 0.9, "tolerate": 2}

    def initial_state(self, prepared: PreventHallucinationParams) -> Sequence[float]:
        """The place in the phrase, and the number of unsure steps."""
        return (0, 0)

    def constants(self, rows: Sequence[PreventHallucinationParams], device: torch.device) -> list[torch.Tensor]:
        """`minp`, float32 [rows], and `tolerate`, float64 [rows]."""
        return [
            to_device((row.minp for row in rows), np.float32, device),
            to_device((row.tolerate for row in rows), np.float64, device),
        ]

    def advance(
        self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: list[torch.Tensor]
    ) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        minp, tolerate = constants
        places, unsure = state.unbind(1)
        unsure = unsure + (logits.softmax(1).amax(1) < minp)
        forced = torch.where(places == 0, unsure > tolerate, places < phrases.lengths)
        written = places >= phrases.lengths
        following = torch.stack((places + forced, unsure), dim=1)
        return PhraseStep(forced, places, following.masked_fill(written.unsqueeze(1), 0))
