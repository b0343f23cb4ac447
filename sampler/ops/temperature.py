"""Temperature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .sampler_op import SamplerOp, SamplingRow

_FLOAT32 = torch.finfo(torch.float32)


def apply_temperature(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide each row by its temperature, in place.

    If a row's largest logit would exceed float32's range, the row is first shifted to a maximum of 0: the probabilities
    are the same, and a temperature close to 0 approaches the argmax instead of NaN.

    Args:
        logits: float32 [rows, vocab].
        peak: float32 [rows, 1]: each row's largest logit, finite.
        temperature: float32 [rows, 1], above 0.
    """
    scaled = peak / temperature
    # A finite sum shows at once that no row overflows. A sum of finite values that overflows only costs the line below,
    # which costs a GPU less than to be asked.
    if logits.device.type != "cpu" or not math.isfinite(scaled.sum()):
        logits -= peak.where(~torch.isfinite(scaled), 0.0)
    logits /= temperature


class Temperature(SamplerOp[float, torch.Tensor]):
    """Divides each row by its temperature, greedy ones by 1."""

    def new_state(self, row: SamplingRow) -> float:
        """Return the divisor: clamped to float32's range, as dividing by 0 or infinity would give NaN."""
        return 1.0 if row.params.greedy else min(max(row.params.temperature, _FLOAT32.tiny), _FLOAT32.max)

    def prepare(self, states: Mapping[int, float]) -> torch.Tensor:
        """Return the divisors: float32 [rows, 1]."""
        return self._to_device(np.array([*states.values()], dtype=np.float32))[:, None]

    def apply(self, logits: torch.Tensor, peak: torch.Tensor, rows: Sequence[int] | None) -> None:
        """Call `apply_temperature` with the rows' temperatures."""
        temperature = self.prepared(rows)
        if temperature is not None:
            apply_temperature(logits, peak, temperature)
