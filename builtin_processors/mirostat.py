"""Mirostat 2.0: keeps the surprise of the text close to a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.row_sums import row_sums
from logitship.builtin_processors.parts.sampling_rule import RandomRowsProcessor, StepNumbers, temperature_of
from logitship.builtin_processors.parts.step_states import RowState, StepStates, as_batch
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.ops.rows import one_thread_for_few
from logitship.sampler.ops.sample_tokens import random_sample

from .params import Expects, ProcessorParams

_STREAM = 2
"""The stream of its random numbers."""


class Mirostat2Params(ProcessorParams):
    """See `Mirostat2LogitsProcessor`."""

    mirostat_tau: Annotated[float, Field(ge=0, le=1000), Expects("a number from 0 to 1000")] = 5.0
    """The target, in bits."""
    mirostat_eta: Annotated[float, Field(ge=0, le=1), Expects("a number from 0 to 1")] = 0.1
    """The learning rate."""


class Mirostat2LogitsProcessor(RandomRowsProcessor):
    """Samples from the tokens with a surprise of at most μ bits, and moves μ towards a mean surprise of `mirostat_tau`.

    μ begins at 2 · `mirostat_tau`, and is lowered in each step by `mirostat_eta` · (surprise - `mirostat_tau`): the
    surprise of the sampled token among those that stayed. The most likely token always stays. The surprise is that
    after the request's temperature, `sampling_params.temperature`.

    Samples the token itself, as llama.cpp's sampler does, and forbids all others: what follows it, such as `top_p`, has
    nothing left to choose. A step's random number depends on the request's seed and the number of output tokens alone;
    without a seed, on the request id. If tokens are removed, μ is restored, by up to `STEPS_KEPT` tokens.

    Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (arXiv:2007.14966);
    parameters and edge cases are llama.cpp's.
    """

    name = "mirostat_2"
    Params = Mirostat2Params

    def __init__(self) -> None:
        super().__init__()
        self._numbers = StepNumbers(_STREAM)

    def constants(self, prepared: Mirostat2Params, temperature: float) -> Sequence[float]:
        """See `RandomRowsProcessor.constants`."""
        return temperature, prepared.mirostat_tau, prepared.mirostat_eta

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Leave one token in each row with random sampling, in place."""
        if not custom_param_list:
            return logits
        rows = self._rows.of(custom_param_list, logits.device)
        if not len(rows.places):
            return logits
        uniform = to_device(self._numbers.of(custom_param_list)[rows.places], np.float64, logits.device)
        sampling = [custom_param_list[place] for place in rows.places]
        histories = [self._history(params, logits.device) for params in sampling]
        before = [len(params["__req__"].output_ids) for params in sampling]
        limits = as_batch([history.before(length) for history, length in zip(histories, before, strict=True)])
        following = torch.empty_like(limits)
        with one_thread_for_few(logits):
            for part, some in rows.parts(logits):
                following[part] = self._sample(some, uniform[part], limits[part], rows.constants_on_device[part])
        for row, (history, length) in enumerate(zip(histories, before, strict=True)):
            history.add(length, RowState(following, row))
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`. A step whose token is certain moves μ, too."""
        for params, each in zip(param_list, allowed, strict=True):
            if temperature_of(params["__req__"]) is not None:
                each.leave_open()

    def _sample(
        self, logits: torch.Tensor, uniform: torch.Tensor, limits: torch.Tensor, constants: torch.Tensor
    ) -> torch.Tensor:
        """Leave one token in each row.

        Args:
            logits: float32 [rows, vocab], edited in place.
            uniform: float64 [rows], in [0, 1).
            limits: float64 [rows, 1], μ in bits.
            constants: float32 [rows, 3].

        Returns:
            The next μ, float64 [rows, 1].
        """
        temperature, tau, eta = constants.unsqueeze(-1).unbind(1)
        weights = self._weights(logits, temperature)
        total = row_sums(weights)
        # The largest weight is 1, so the most likely token stays.
        least = (total * torch.exp2(-limits)).clamp_(max=1.0).to(weights.dtype)
        kept = torch.where(weights < least, 0.0, weights)
        total = row_sums(kept)
        # A row without a finite logit has no probabilities. Any will do: none of its tokens can be sampled.
        probabilities = kept.div_(total.to(kept.dtype)).masked_fill_(~(total > 0), 1 / logits.shape[1])
        tokens = random_sample(probabilities, uniform).unsqueeze(1)
        values = logits.gather(1, tokens)
        logits.fill_(-math.inf).scatter_(1, tokens, values)
        surprise = -probabilities.gather(1, tokens).to(torch.float64).log2()
        return limits - eta * (surprise - tau)

    def _history(self, params: dict[str, Any], device: torch.device) -> StepStates:
        state = params["__req__"].state
        if self.name not in state:
            initial = to_device([[2 * self.prepared(params).mirostat_tau]], np.float64, device)
            state[self.name] = StepStates(RowState(initial, 0))
        history: StepStates = state[self.name]
        return history
