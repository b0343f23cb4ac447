"""Exclude Top Choices (XTC): removes the most likely tokens now and then, for more varied texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_sums import row_sums
from logitship.builtin_processors.parts.sampling_rule import RuleRows, SamplingRule, StepNumbers

from .params import Count, Expects, ProcessorParams

_STREAM = 1
"""The stream of its random numbers."""
_MANY = 2**31


class XTCParams(ProcessorParams):
    """See `XTCLogitsProcessor`."""

    xtc_probability: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")]
    """The probability that a step removes tokens. 0: never."""
    xtc_threshold: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")] = 0.1
    """The probability from which on a token is a top choice. Above 0.5: nothing is removed."""
    min_keep: Count = 0
    """Minimum number of tokens that stay, or nothing is removed."""
    after_temperature: Annotated[bool, Expects("true or false")] = False
    """Use the probabilities after the request's temperature. False: those before it."""


class XTCLogitsProcessor(SamplingRule):
    """Forbids all tokens with a probability of at least `xtc_threshold` except the least likely one of them.

    Each step does so with `xtc_probability`. If several are the least likely one, all of them stay. A step's random
    number depends on the request's seed and the number of output tokens alone; without a seed, on the request id.

    p-e-w 2024 (oobabooga/text-generation-webui#6335); parameters and edge cases are llama.cpp's, which uses the
    probabilities before temperature.
    """

    name = "xtc"
    Params = XTCParams
    example: ClassVar[Mapping[str, Any]] = {"xtc_probability": 0.5, "xtc_threshold": 0.05}

    def __init__(self) -> None:
        super().__init__()
        self._numbers = StepNumbers(_STREAM)

    def constants(self, prepared: XTCParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        if prepared.xtc_probability == 0 or prepared.xtc_threshold > 0.5:
            return None
        temperature = temperature if prepared.after_temperature else 1.0
        min_keep = min(prepared.min_keep, _MANY)
        return temperature, prepared.xtc_threshold, min_keep, prepared.xtc_probability

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Remove the top choices of the rows whose random numbers say so, in place."""
        if not custom_param_list:
            return logits
        rows = self._rows.of(custom_param_list, logits.device)
        if not len(rows.places):
            return logits
        uniform = self._numbers.of(custom_param_list)[rows.places]
        chosen = uniform <= rows.constants[:, 3]
        if chosen.all():
            self._edit(logits, rows)
        elif chosen.any():
            some = RuleRows.of(rows.places[chosen], rows.constants[chosen], len(logits), logits.device)
            self._edit(logits, some)
        return logits

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        temperature, threshold, min_keep, _ = constants
        weights = self._weights(logits, temperature)
        limit = (threshold * row_sums(weights)).to(weights.dtype)
        # Masked tokens are no choices, even if the threshold is 0.
        is_finite = logits > -math.inf
        is_top = (weights >= limit) & is_finite
        least = weights.masked_fill(~is_top, math.inf).amin(dim=1, keepdim=True)
        removed = is_top & (weights > least)
        stays = is_finite.sum(dim=1, keepdim=True) - removed.sum(dim=1, keepdim=True)
        logits.masked_fill_(removed & (stays >= min_keep), -math.inf)
