"""`logit_bias`: a number added to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from logitship.sampler.batch_rows import BatchRows
from logitship.sampler.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.sampling_params import SamplingParams


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds each request's biases to its row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: BatchRows[Mapping[int, float]] = BatchRows(_biases)

    def is_argmax_invariant(self) -> bool:
        """False: a bias may make another token the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        if self._rows.update(batch_update):
            pairs = [(row, token) for row, biases in self._rows.items() for token in biases]
            self._positions = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.to(self._device)
            values = [bias for biases in self._rows.values() for bias in biases.values()]
            self._biases = torch.tensor(values, dtype=torch.float32).to(self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the biases, in place: float32 [rows, vocab]."""
        if self._rows:
            rows, token_ids = self._positions
            logits[rows, token_ids] += self._biases
        return logits


def _biases(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> Mapping[int, float] | None:
    # A copy: a shipped processor sees its request's parameters, and may edit what it sees.
    return dict(params.logit_bias) or None
