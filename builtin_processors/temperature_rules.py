"""Replacements of the temperature: dynamic temperature and quadratic sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from logitship.builtin_processors.parts.sampling_rule import SamplingRule

from .params import Expects, ProcessorParams

_FLOAT32 = torch.finfo(torch.float32)
_WIDE = 1e30
"""More than any useful distance between temperatures."""


class DynamicTemperatureParams(ProcessorParams):
    """See `DynamicTemperatureLogitsProcessor`."""

    dynatemp_range: Annotated[float, Field(ge=0), Expects("a number, 0 or greater")]
    """Distance of the lowest and the highest temperature from the request's. 0: nothing changes."""
    dynatemp_exponent: Annotated[float, Field(gt=0, le=100), Expects("a number above 0 and at most 100")] = 1.0
    """The exponent of the normalized entropy."""


class DynamicTemperatureLogitsProcessor(SamplingRule):
    """Replaces the temperature by one that grows with the entropy of the step.

    It is low + (high - low) · (H / log n)^`dynatemp_exponent`: low and high are `dynatemp_range` below and above the
    request's temperature, `sampling_params.temperature`, but low at least 0; H is the entropy before temperature, and n
    the number of tokens with a finite logit. A row with one such token stays as it is. At a temperature of 0, the most
    likely token stays.

    The engine divides by the request's temperature afterwards, so the logits are multiplied by it here.

    llama.cpp's parameters, edge cases and formula, as kalomaze's in koboldcpp ("DynaTemp").
    """

    name = "dynamic_temperature"
    Params = DynamicTemperatureParams
    example: ClassVar[Mapping[str, Any]] = {"dynatemp_range": 0.5}

    def constants(self, prepared: DynamicTemperatureParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        spread = min(prepared.dynatemp_range, _WIDE)
        return (temperature, spread, prepared.dynatemp_exponent) if spread else None

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        temperature, spread, exponent = (each.to(torch.float64) for each in constants)
        peak = logits.amax(dim=1, keepdim=True)
        distances = self._distances(logits, torch.ones_like(peak))
        entropy, _ = self._entropy(distances, torch.exp(distances, out=self._buffer(1, logits)))
        count = (logits > -math.inf).sum(dim=1, keepdim=True)
        normalized = (entropy / count.clamp(min=2).log()).clamp_(0.0, 1.0)
        low, high = (temperature - spread).clamp(min=0.0), temperature + spread
        dynamic = low + (high - low) * normalized.pow(exponent)
        # Relative to the largest logit, which nothing can overflow.
        factor = torch.where(count > 1, temperature / dynamic, 1.0).clamp_(_FLOAT32.tiny, _FLOAT32.max)
        factor = factor.to(logits.dtype)
        logits.sub_(peak).mul_(factor).add_(peak)


class QuadraticParams(ProcessorParams):
    """See `QuadraticLogitsProcessor`."""

    smoothing_factor: Annotated[float, Field(ge=0, le=100), Expects("a number from 0 to 100")]
    """The strength. 0: nothing changes."""
    smoothing_curve: Annotated[float, Field(ge=1, le=10), Expects("a number from 1 to 10")] = 1.0
    """1: quadratic. Greater: the more unlikely tokens become the more unlikely."""


class QuadraticLogitsProcessor(SamplingRule):
    """Maps a logit's distance d from the largest one to f · d² · (s · d - k), so that likely tokens get closer.

    f is `smoothing_factor`, k = (3 - `smoothing_curve`) / 2 and s = (`smoothing_curve` - 1) / 2. The distance is that
    after temperature, and the result is not divided by it again: the request's temperature,
    `sampling_params.temperature`, which the engine divides by afterwards, is multiplied with it here.

    kalomaze's quadratic sampling, with parameters and formula of koboldcpp and text-generation-webui.
    """

    name = "quadratic"
    Params = QuadraticParams
    example: ClassVar[Mapping[str, Any]] = {"smoothing_factor": 0.3, "smoothing_curve": 1.5}

    def constants(self, prepared: QuadraticParams, temperature: float) -> Sequence[float] | None:
        """See `RandomRowsProcessor.constants`."""
        factor, curve = prepared.smoothing_factor, prepared.smoothing_curve
        strength = min(temperature * factor, _FLOAT32.max)
        return (temperature, strength, (3 - curve) / 2, (curve - 1) / 2) if factor else None

    def edit(self, logits: torch.Tensor, *constants: torch.Tensor) -> None:
        """See `SamplingRule.edit`."""
        temperature, factor, k, s = constants
        peak = logits.amax(dim=1, keepdim=True)
        distances = torch.sub(logits, peak, out=self._buffer(0, logits)).div_(temperature)
        # With a finite bound, no product of 0 and infinity: at it, the probability is 0 for any parameters.
        bent = torch.mul(distances.clamp_(min=-1e12), s, out=self._buffer(1, logits)).sub_(k)
        bent.mul_(distances.square_()).mul_(factor).add_(peak)
        logits.copy_(torch.where(logits > -math.inf, bent, logits))
