"""`min_p`: only tokens that are not too unlikely compared with the most likely one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.batch_processors.batch_rows import BatchRows, rows_of_drafts
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.device_tensor import copies_to
from logitship.sampler.ops.rows import row_parts
from logitship.sampler.sampling_params import SamplingParams

_PART_SIZE = 2**18
"""Number of logits to process at a time."""


class MinPLogitsProcessor(LogitsProcessor):
    """Forbids tokens whose probability is below `min_p` times that of the most likely token.

    Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs" (arXiv:2407.01082).
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[float] = BatchRows(_log_min_p)

    def is_argmax_invariant(self) -> bool:
        """True: the most likely token always stays."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        if self._rows.update(batch_update) and self._rows:
            rows = sorted(self._rows)
            self._index = self._to_device(np.array(rows, dtype=np.int64))
            self._log_min_p = self._to_device(np.array([[self._rows[row]] for row in rows], dtype=np.float32))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the tokens that are too unlikely to -inf, in place: float32 [rows, vocab]."""
        if self._rows:
            _forbid_unlikely(logits, self._index, self._log_min_p)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `SpeculativeLogitsProcessor`."""
        rows = rows_of_drafts(num_draft_tokens)
        indices = [index for index, row in enumerate(rows) if row in self._rows]
        if indices:
            index = self._to_device(np.array(indices, dtype=np.int64))
            log_min_p = np.array([[self._rows[rows[index]]] for index in indices], dtype=np.float32)
            _forbid_unlikely(logits, index, self._to_device(log_min_p))
        return logits

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`. The most likely token stays, so the only one does."""


def _forbid_unlikely(logits: torch.Tensor, rows: torch.Tensor, log_min_p: torch.Tensor) -> None:
    for part in row_parts(len(rows), logits, _PART_SIZE):
        # A view if these are all rows.
        some = logits[part] if len(rows) == len(logits) else logits[rows[part]]
        # A ratio of probabilities is a difference of logits: no softmax is needed.
        some.masked_fill_(some < some.amax(dim=-1, keepdim=True) + log_min_p[part], -math.inf)
        if len(rows) < len(logits):
            logits[rows[part]] = some


def _log_min_p(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> float | None:
    return math.log(params.min_p) if params.min_p > 0 else None
