"""Temperature."""

from __future__ import annotations

import math

import torch


def apply_temperature(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide each row by its temperature, in place.

    A row whose largest logit would leave float32's range is first shifted so that it becomes 0: the probabilities are
    the same, and a temperature close to 0 approaches the argmax instead of NaN.

    Args:
        logits: float32 [rows, vocab].
        peak: float32 [rows, 1]: each row's largest logit, finite.
        temperature: float32 [rows, 1], above 0.
    """
    scaled = peak / temperature
    # One number tells that none overflows, mostly: a sum that does by itself only costs the closer look.
    if not math.isfinite(scaled.sum()):
        logits -= peak.where(~torch.isfinite(scaled), 0.0)
    logits /= temperature
