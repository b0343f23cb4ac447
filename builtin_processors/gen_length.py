"""Makes answers shorter or longer. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.target_token import TargetToken, TargetTokenParams
from logitship.builtin_processors.parts.text_tokens import MAX_BOOST, Boost

from .base import BuiltinProcessor
from .params import Expects, ModelFacts


class GenLengthParams(TargetTokenParams):
    """See `GenLengthLogitsProcessor`."""

    boost_factor: Boost
    """The boost after 10 tokens. Negative: longer answers. Typical values are from -1 to 1."""
    p: Annotated[int, Field(ge=0, le=20), Expects("an integer from 0 to 20")] = 2
    """The exponent of the number of tokens in the boost."""


@dataclass(frozen=True)
class LengthBoost:
    """The request's validated parameters: a token, and the boost of its logit."""

    target: TargetToken
    boost_factor: float
    p: int

    def after(self, num_output_tokens: int) -> float:
        """Return `boost_factor * (tokens / 10) ** p`, clamped to the range of a logit."""
        boost: float = self.boost_factor * num_output_tokens**self.p / 10**self.p
        return min(max(boost, -MAX_BOOST), MAX_BOOST)


class GenLengthLogitsProcessor(BuiltinProcessor):
    """Adds a boost that grows with the number of tokens, `boost_factor * (tokens / 10) ** p`, to the EOS token's logit.

    Nothing is added once the token was sampled. `boost_token_str` replaces the EOS token by another one. With
    `complete_sentences`, the token is only boosted after a full stop or a new line.
    """

    name = "gen_length"
    Params = GenLengthParams
    example: ClassVar[Mapping[str, Any]] = {"boost_factor": 0.5, "complete_sentences": True}

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> LengthBoost:
        """See `BuiltinProcessor.prepare`."""
        read = GenLengthParams.read(params, model)
        return LengthBoost(TargetToken.of(read, model), read.boost_factor, read.p)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Boost each row's token, in place, with one write for all rows."""
        cells: list[tuple[int, int]] = []
        boosts: list[float] = []
        for row, params in enumerate(custom_param_list or ()):
            wanted: LengthBoost = self.prepared(params)
            if wanted.target.is_due(params, self.name):
                cells.append((row, wanted.target.token))
                boosts.append(wanted.after(len(params["__req__"].output_ids)))
        if cells:
            rows, tokens = to_device(cells, np.int64, logits.device).unbind(1)
            logits[rows, tokens] += to_device(boosts, np.float32, logits.device)
        return logits
