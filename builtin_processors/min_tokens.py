"""`min_tokens`: no end before so many tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from logitship.sampler.batch_rows import BatchRows
from logitship.sampler.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True)
class _ShortOutput:
    min_tokens: int
    output_token_ids: list[int]
    stop_token_ids: Collection[int]

    @property
    def long_enough(self) -> bool:
        return len(self.output_token_ids) >= self.min_tokens


class MinTokensLogitsProcessor(LogitsProcessor):
    """Forbids end and stop tokens until a request has `min_tokens` output tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: BatchRows[_ShortOutput] = BatchRows(_short_output)
        self._index()

    def is_argmax_invariant(self) -> bool:
        """False: the most likely token may be an end token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and drop the rows that have reached their minimum."""
        changed = self._rows.update(batch_update)
        changed |= self._rows.discard_if(lambda row: row.long_enough)
        if changed:
            self._index()

    def _index(self) -> None:
        pairs = [(row, token) for row, state in self._rows.items() for token in state.stop_token_ids]
        self._forbidden = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.to(self._device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid the stop tokens of the rows that are still short, in place: float32 [rows, vocab]."""
        if self._rows:
            rows, token_ids = self._forbidden
            logits[rows, token_ids] = float("-inf")
        return logits


def _short_output(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> _ShortOutput | None:
    state = _ShortOutput(params.min_tokens, output_token_ids, params.all_stop_token_ids)
    return None if state.long_enough or not state.stop_token_ids else state
