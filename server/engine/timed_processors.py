"""`ShippedProcessors` whose time counts as a phase of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.metrics.step_clock import StepClock


class TimedProcessors(ShippedProcessors):
    """See `ShippedProcessors`.

    Args:
        clock: counts the calls as its phase `processors`.
    """

    def __init__(self, *args: Any, clock: StepClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `ShippedProcessors.apply`."""
        with self._clock.processors:
            return super().apply(logits)

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `ShippedProcessors.apply_with_spec_decode`."""
        with self._clock.processors:
            return super().apply_with_spec_decode(logits, num_draft_tokens)
