"""`logit_bias`: adds numbers to the logits of given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import MOST_EDITED, AllowedTokens
from logitship.sampler.batch_processors.batch_rows import BatchRows, rows_of_drafts
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.device_tensor import TokenPositions, copies_to, token_positions
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
            self._positions, self._values = self._on_device(self._rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the biases, in place: float32 [rows, vocab]."""
        if self._rows:
            logits[self._positions] += self._values
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `SpeculativeLogitsProcessor`."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        biases = {index: self._rows[row] for index, row in rows if row in self._rows}
        if biases:
            positions, values = self._on_device(biases)
            logits[positions] += values
        return logits

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`. A bias may raise a token, but forbids none."""
        biases = self._rows.get(row)
        if biases is not None and not (np.abs(biases.values) < MOST_EDITED).all():
            allowed.leave_open()

    def _on_device(self, biases: Mapping[int, _Biases]) -> tuple[TokenPositions, torch.Tensor]:
        token_ids = {row: each.token_ids for row, each in biases.items()}
        values = np.concatenate([each.values for each in biases.values()])
        return token_positions(token_ids, self._to_device), self._to_device(values)


def _biases(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Biases | None:
    if not params.logit_bias:
        return None
    return _Biases(
        np.array(list(params.logit_bias), dtype=np.int64), np.array(list(params.logit_bias.values()), dtype=np.float32)
    )
