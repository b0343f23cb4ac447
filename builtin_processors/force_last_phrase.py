"""A phrase before the end of an answer. The behaviour is that of NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from logitship.builtin_processors.parts.enforce import argmax_is_among
from logitship.builtin_processors.parts.phrase_processor import PhraseParams, PhraseProcessor, Phrases, PhraseStep
from logitship.builtin_processors.parts.row_constants import padded

from .params import ModelFacts


class ForceLastPhraseParams(PhraseParams):
    """See `ForceLastPhraseLogitsProcessor`."""


@dataclass(frozen=True)
class LastPhrase:
    """What a request asks for.

    Attributes:
        phrase: its tokens.
        end_tokens: the model's.
    """

    phrase: tuple[int, ...]
    end_tokens: tuple[int, ...]


class ForceLastPhraseLogitsProcessor(PhraseProcessor):
    """Writes `phrase` once, at the place where the answer would have ended.

    The phrase begins in the first step whose argmax is an end token, and stands in its place. After the phrase the
    model goes on by itself, and may end. Every end token of the model counts; the original knows the tokenizer's alone.
    """

    name = "force_last_phrase"
    Params = ForceLastPhraseParams
    example: ClassVar[Mapping[str, Any]] = {"phrase": "ab"}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> LastPhrase:
        """See `BuiltinProcessor.prepare`."""
        read = ForceLastPhraseParams.read(params, model)
        if not model.eos_token_ids:
            raise ValueError("the model has no end token for the phrase to stand before")
        return LastPhrase(read.phrase, tuple(sorted(model.eos_token_ids)))

    def initial_state(self, prepared: LastPhrase) -> Sequence[float]:
        """The place in the phrase. One behind its end: it was written."""
        return (0,)

    def constants(self, rows: Sequence[LastPhrase], device: torch.device) -> torch.Tensor:
        """The end tokens, int64 [rows, any]."""
        return padded([row.end_tokens for row in rows], device)

    def advance(
        self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: torch.Tensor
    ) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        places = state[:, 0]
        forced = torch.where(places == 0, argmax_is_among(logits, constants), places < phrases.lengths)
        return PhraseStep(forced, places, state + forced.unsqueeze(1))
