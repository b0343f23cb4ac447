"""Ends an output, or its thinking, once the model has become certain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field, PlainValidator, ValidationInfo

from logitship.builtin_processors.parts.marker import MarkerInputOrNull, read_marker
from logitship.builtin_processors.parts.phrase_processor import PhraseProcessor, Phrases, PhraseStep
from logitship.builtin_processors.parts.row_constants import to_device
from logitship.builtin_processors.parts.row_sums import row_sums
from logitship.builtin_processors.parts.text_tokens import eos_token_id

from .params import Expects, ProcessorParams, model_of

_LOWEST = -200.0
"""Distance from the largest logit at which a probability is 0 in float32."""


def read_end(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    """Return the tokens that end an output; the EOS token if there are none.

    Raises:
        ValueError: see `read_marker`; or the model has no EOS token.
    """
    return (eos_token_id(model_of(info)),) if value is None else read_marker(value, info)


class EntropyStopParams(ProcessorParams):
    """See `EntropyStopLogitsProcessor`."""

    entropy_threshold: Annotated[float, Field(ge=0), Expects("a number, 0 or greater")]
    """The mean entropy, in nats, at which the output ends."""
    entropy_window: Annotated[int, Field(ge=1, le=1_000_000), Expects("an integer from 1 to 1000000")] = 32
    """Number of steps that the mean is about, and before which nothing ends."""
    entropy_end: Annotated[
        tuple[int, ...],
        PlainValidator(read_end, json_schema_input_type=MarkerInputOrNull),
        Expects("a text, a list of token ids, or null for the EOS token"),
        Field(default=None, validate_default=True),
    ]
    """The end of the output: a text, or its token ids, such as `</think>`. null: the EOS token."""

    @property
    def phrase(self) -> tuple[int, ...]:
        """The tokens to write."""
        return self.entropy_end


class EntropyStopLogitsProcessor(PhraseProcessor):
    """Writes `entropy_end` once the mean entropy of the last steps is at most `entropy_threshold` nats.

    The entropy is that of the row before temperature, after the edits of earlier processors. The mean is exponential:
    it begins with that of the first step, and each step moves it by 2 / (`entropy_window` + 1) of the difference. The
    end begins after `entropy_window` steps at the earliest, and is written once. All other tokens of the row are
    forbidden; a step in which its next token is forbidden by a mask leaves the row as it is, and the end waits.

    After Sharma and Chopra 2025, "Think Just Enough" (arXiv:2510.08146), who stop at a mean entropy, and Wang et al.
    2025, "Entropy After </Think>" (arXiv:2509.26522), who use an exponential mean.
    """

    name = "entropy_stop"
    Params = EntropyStopParams
    example: ClassVar[Mapping[str, Any]] = {"entropy_threshold": 2.0, "entropy_window": 2, "entropy_end": [5, 6]}

    def initial_state(self, prepared: EntropyStopParams) -> Sequence[float]:
        """Return the index in the phrase, the number of steps, and the mean entropy."""
        return (0, 0, 0)

    def constants(self, rows: Sequence[EntropyStopParams], device: torch.device) -> list[torch.Tensor]:
        """Return the threshold and the window, float64 [rows]."""
        return [
            to_device((row.entropy_threshold for row in rows), np.float64, device),
            to_device((row.entropy_window for row in rows), np.float64, device),
        ]

    def advance(
        self, logits: torch.Tensor, state: torch.Tensor, phrases: Phrases, constants: list[torch.Tensor]
    ) -> PhraseStep:
        """See `PhraseProcessor.advance`."""
        threshold, window = constants
        indices, steps, mean = state.unbind(1)
        entropy = _entropy(logits)
        mean = torch.where(steps == 0, entropy, mean + 2 / (window + 1) * (entropy - mean))
        steps = steps + 1
        begins = (indices == 0) & (steps > window) & (mean <= threshold)
        wanted = begins | ((indices > 0) & (indices < phrases.lengths))
        forced = wanted & (logits.gather(1, phrases.at(indices))[:, 0] > -math.inf)
        # Never at 0 again once it has begun: then it is at most its length, where nothing is wanted.
        return PhraseStep(forced, indices, torch.stack((indices + forced, steps, mean), dim=1))

    def enforce(self, logits: torch.Tensor, tokens: torch.Tensor, forced: torch.Tensor) -> None:
        """See `PhraseProcessor.enforce`: forbid all other tokens."""
        if logits.device.type == "cpu" and not forced.any():
            return
        values = logits.gather(1, tokens)
        logits.masked_fill_(forced.unsqueeze(1), -math.inf).scatter_(1, tokens, values)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row in nats, float64 [rows]."""
    distances = (logits - logits.amax(dim=1, keepdim=True)).clamp_(min=_LOWEST)
    weights = distances.exp()
    total = row_sums(weights)
    return (total.log() - row_sums(distances.mul_(weights)) / total)[:, 0]
