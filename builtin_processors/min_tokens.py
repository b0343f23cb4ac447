"""`min_tokens`: no end before so many tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.batch_processors.batch_rows import BatchRows
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.device_tensor import TokenPositions, copies_to, token_positions
from logitship.sampler.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class _ShortOutput:
    min_tokens: int
    output_token_ids: list[int]
    stop_token_ids: npt.NDArray[np.int64]

    @property
    def missing(self) -> int:
        return max(self.min_tokens - len(self.output_token_ids), 0)


class MinTokensLogitsProcessor(LogitsProcessor):
    """Forbids end and stop tokens until a request has `min_tokens` output tokens.

    They stay forbidden if no other token is left; the sampler then ends the request with `NoTokenLeftError`. (vLLM
    0.32.0 allows them again in rows with structured output, which does not exist at this level here.)
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[_ShortOutput] = BatchRows(_short_output)
        self._forbidden: TokenPositions | None = None
        # A tensor on the device: a Python number would be copied there in each step, synchronously.
        self._minus_infinity = torch.tensor(-math.inf, dtype=torch.float32, device=device)

    def is_argmax_invariant(self) -> bool:
        """False: the most likely token may be an end token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch, and drop the rows that have reached their minimum."""
        changed = self._rows.update(batch_update)
        changed |= self._rows.discard_if(lambda row: len(row.output_token_ids) >= row.min_tokens)
        if changed:
            self._forbidden = self._positions({row: state.stop_token_ids for row, state in self._rows.items()})

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid the stop tokens of the rows below their minimum, in place: float32 [rows, vocab]."""
        if self._forbidden is not None:
            logits.index_put_(self._forbidden, self._minus_infinity)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Like `apply`, but a request has one row for each of its draft tokens.

        A draft token counts the drafts before it, so a request that misses m tokens is below its minimum in its first m
        rows.

        Args:
            logits: float32 [sum of `num_draft_tokens`, vocab], edited in place. The requests' rows are in the order of
                the batch: with [2, 3, 1], the request at row 1 of the batch has rows 2 to 4.
            num_draft_tokens: rows of each request of the batch; 0 for one without drafts.
        """
        if not self._rows:
            return logits
        first = np.cumsum([0, *num_draft_tokens])
        forbidden = self._positions(
            {
                int(first[request]) + draft: state.stop_token_ids
                for request, state in self._rows.items()
                for draft in range(min(state.missing, num_draft_tokens[request]))
            }
        )
        return logits if forbidden is None else logits.index_put_(forbidden, self._minus_infinity)

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`."""
        state = self._rows.get(row)
        if state is not None and state.missing:
            allowed.forbid(state.stop_token_ids.tolist())

    def _positions(self, stop_token_ids: Mapping[int, npt.NDArray[np.int64]]) -> TokenPositions | None:
        return token_positions(stop_token_ids, self._to_device) if stop_token_ids else None


def _short_output(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> _ShortOutput | None:
    stop_token_ids = np.array(sorted(params.all_stop_token_ids), dtype=np.int64)
    state = _ShortOutput(params.min_tokens, output_token_ids, stop_token_ids)
    return state if state.missing > 0 and len(stop_token_ids) > 0 else None
