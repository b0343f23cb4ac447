"""Truncation of the tokens by a limit that follows from sums over the vocabulary: top-nσ and p-less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch

from logitship.builtin_processors.parts.row_sums import row_sums
from logitship.builtin_processors.parts.sampling_rule import SamplingRule

from .params import Expects, ProcessorParams


class TopNSigmaParams(ProcessorParams):
    """See `TopNSigmaLogitsProcessor`."""

    top_n_sigma: Annotated[float, Expects("a number")]
    """n, the number of standard deviations. 0 or less: all tokens stay."""


class TopNSigmaLogitsProcessor(SamplingRule):
    """Forbids tokens whose logit is more than `top_n_sigma` standard deviations below the largest one.

    The standard deviation is that of the finite logits. Temperature does not change which tokens stay.

    Tang et al. 2024, "Top-nσ: Not All Logits Are You Need" (arXiv:2411.07641); with llama.cpp's parameter and edge
    cases.
    """

    name = "top_n_sigma"
    Params = TopNSigmaParams
    example: ClassVar[Mapping[str, Any]] = {"top_n_sigma": 1.0}

    def constants(self, prepared: TopNSigmaParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        return (prepared.top_n_sigma,) if prepared.top_n_sigma > 0 else None

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        (n,) = constants
        peak = logits.amax(dim=1, keepdim=True)
        forbidden = logits.isneginf()
        # Relative to the largest logit, so that the squares keep their digits.
        distances = torch.sub(logits, peak, out=self._buffer(0, logits)).masked_fill_(forbidden, 0.0)
        count = logits.shape[1] - forbidden.sum(dim=1, keepdim=True)
        mean = row_sums(distances) / count
        squares = row_sums(torch.mul(distances, distances, out=self._buffer(1, logits))) / count
        deviation = (squares - mean.square()).clamp_(min=0.0).sqrt()
        limit = peak - (n * deviation).to(logits.dtype)
        logits.masked_fill_(logits < limit, -math.inf)


class PLessParams(ProcessorParams):
    """See `PLessLogitsProcessor`."""

    p_less_norm: Annotated[bool, Expects("true or false")] = False
    """Use the paper's p-less-norm, whose limit is lower."""
    after_temperature: Annotated[bool, Expects("true or false")] = True
    """Use the probabilities after the request's temperature. False: those before it."""


class PLessLogitsProcessor(SamplingRule):
    """Forbids tokens less likely than the sum of all squared probabilities: that two samples are the same token.

    With `p_less_norm`, the limit is (V · L - 1) / (V - 1), where L is that sum and V the size of the vocabulary. The
    probabilities are those after the request's temperature, `sampling_params.temperature`.

    Tan et al. 2025, "p-less Sampling: A Robust Hyperparameter-Free Approach for LLM Decoding" (arXiv:2509.23234).
    """

    name = "p_less"
    Params = PLessParams

    def constants(self, prepared: PLessParams, temperature: float) -> Sequence[float]:
        """See `RandomRowsProcessor.constants`."""
        return temperature if prepared.after_temperature else 1.0, prepared.p_less_norm

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        temperature, is_normalized = constants
        weights = self._weights(logits, temperature)
        total = row_sums(weights)
        squares = row_sums(torch.mul(weights, weights, out=self._buffer(1, logits)))
        limit = squares / total.square()
        size = logits.shape[1]
        limit = torch.where(is_normalized > 0, (size * limit - 1) / max(1, size - 1), limit)
        # The largest weight is 1: rounding must not forbid it.
        logits.masked_fill_(weights < (limit * total).clamp_(max=1.0).to(weights.dtype), -math.inf)
