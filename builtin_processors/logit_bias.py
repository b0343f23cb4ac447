"""`logit_bias`: a number added to the logits of chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.batch_rows import BatchRows
from logitship.sampler.device_tensor import copies_to, token_positions
from logitship.sampler.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class _Biases:
    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds each request's biases to its row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[_Biases] = BatchRows(_biases)

    def is_argmax_invariant(self) -> bool:
        """False: a bias may make another token the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        if self._rows.update(batch_update) and self._rows:
            token_ids = {row: biases.token_ids for row, biases in self._rows.items()}
            self._positions = token_positions(token_ids, self._to_device)
            self._values = self._to_device(np.concatenate([biases.values for biases in self._rows.values()]))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the biases, in place: float32 [rows, vocab]."""
        if self._rows:
            logits[self._positions] += self._values
        return logits


def _biases(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Biases | None:
    if not params.logit_bias:
        return None
    return _Biases(
        np.array(list(params.logit_bias), dtype=np.int64), np.array(list(params.logit_bias.values()), dtype=np.float32)
    )
