"""Writes a phrase before the end of an answer. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

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
    """The request's validated parameters.

    Attributes:
        phrase: the tokens of the phrase.
        eos_token_ids: the model's EOS tokens.
    """

    phrase: tuple[int, ...]
    eos_token_ids: tuple[int, ...]


class ForceLastPhraseLogitsProcessor(PhraseProcessor):
    """Writes `phrase` once, when the answer would have ended.

    The phrase begins in the first step whose argmax is an EOS token, instead of that token. After the phrase, the model
    continues freely, and may end. All EOS tokens of the model count; the original only uses the tokenizer's.
    """

    name = "force_last_phrase"
    Params = ForceLastPhraseParams
    example: ClassVar[Mapping[str, Any]] = {"phrase": "ab"}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> LastPhrase:
        """See `BuiltinProcessor.prepare`."""
        read = ForceLastPhraseParams.read(params, model)
        if not model.eos_token_ids:
            raise ValueError("the model has no EOS token for the phrase to stand before")
        return LastPhrase(read.phrase, tuple(sorted(model.eos_token_ids)))

    def initial_state(self, prepared: LastPhrase) -> Sequence[float]:
        """The index in the phrase; its length once it was written."""
        return (0,)

    def constants(self, rows: Sequence[LastPhrase], device: torch.device) -> torch.Tensor:
        """Return the EOS tokens, int64 [rows, any]."""
        return padded([row.eos_token_ids for row in rows], device)

    def advance(
        self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: torch.Tensor
    ) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        indices = state[:, 0]
        forced = torch.where(indices == 0, argmax_is_among(logits, constants), indices < phrases.lengths)
        return PhraseStep(forced, indices, state + forced.unsqueeze(1))
