"""Ends the output after a time limit. Behaves as in NVIDIA's logits-processor-zoo 0.2.1."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from logitship.builtin_processors.parts.enforce import enforce
from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.target_token import TargetToken, TargetTokenParams

from .base import BuiltinProcessor
from .params import Expects, ModelFacts


class MaxTimeParams(TargetTokenParams):
    """See `MaxTimeLogitsProcessor`."""

    max_time: Annotated[float, Field(ge=0), Expects("a number of seconds, 0 or greater")]
    """Seconds since the sequence's first step."""


@dataclass(frozen=True)
class TimeLimit:
    """The request's validated parameters: a token, and the time after which it is enforced."""

    target: TargetToken
    max_time: float


class MaxTimeLogitsProcessor(BuiltinProcessor):
    """Enforces the EOS token once more than `max_time` seconds have passed since the sequence's first step.

    It is enforced in each step until it is sampled: if a mask forbids it, the answer continues until it is allowed.
    `boost_token_str` replaces the EOS token by another one. With `complete_sentences`, the token is only enforced after
    a full stop or a new line. The time in the queue does not count, unlike in logits-processor-zoo's variant for vLLM.

    Args:
        clock: a monotonic clock, in seconds.
    """

    name = "max_time"
    Params = MaxTimeParams
    example: ClassVar[Mapping[str, Any]] = {"max_time": 0.0}

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> TimeLimit:
        """See `BuiltinProcessor.prepare`."""
        read = MaxTimeParams.read(params, model)
        return TimeLimit(TargetToken.of(read, model), read.max_time)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Enforce the token in the rows whose time has elapsed, in place."""
        rows = custom_param_list or []
        wanted: list[TimeLimit] = [self.prepared(params) for params in rows]
        now = self._clock()
        over = [self._is_over(params, each, now) for params, each in zip(rows, wanted, strict=True)]
        if any(over):
            tokens = to_device(([each.target.token] for each in wanted), np.int64, logits.device)
            enforce(logits, tokens, to_device(over, np.bool_, logits.device))
        return logits

    def _is_over(self, params: Mapping[str, Any], wanted: TimeLimit, now: float) -> bool:
        started: float = params["__req__"].state.setdefault(f"{self.name}:started", now)
        return now - started > wanted.max_time and wanted.target.is_due(params, self.name)
