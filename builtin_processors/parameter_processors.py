"""The batch processors of sampling parameters: `min_tokens`, `logit_bias` and `min_p`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import MAX_EDITED, AllowedTokens
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import BatchRows, rows_of_drafts
from logitship.sampler.device_tensor import ToDevice, TokenPositions, copies_to, token_positions
from logitship.sampler.ops.rows import row_parts
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
        """False: the most likely token may be an EOS token."""
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


_MANY_BIASES = 2048
"""Biases of a row beyond which they are added as a vector. With 32 rows of a vocabulary of 49,152, both then take about
0.3 ms on two cores; with eight times as many biases, the vectors still do, and single positions take up to 24 ms."""


@dataclass(eq=False)
class _Biases:
    token_ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    _vector: torch.Tensor | None = None

    def vector(self, vocab_size: int, to_device: ToDevice) -> torch.Tensor:
        """Return the bias of each token on the device, float32 [vocab]."""
        if self._vector is None:
            vector = np.zeros(vocab_size, dtype=np.float32)
            vector[self.token_ids] = self.values
            self._vector = to_device(vector)
        return self._vector


class _PlacedBiases:
    """The biases of some rows on the device.

    Args:
        biases: biases by row.
        to_device: copies arrays.
    """

    def __init__(self, biases: Mapping[int, _Biases], to_device: ToDevice) -> None:
        few = {row: each for row, each in biases.items() if len(each.token_ids) <= _MANY_BIASES}
        self._to_device = to_device
        self._many = {row: each for row, each in biases.items() if row not in few}
        self._positions: TokenPositions | None = None
        if few:
            self._positions = token_positions({row: each.token_ids for row, each in few.items()}, to_device)
            self._values = to_device(np.concatenate([each.values for each in few.values()]))

    def add_to(self, logits: torch.Tensor) -> None:
        """Add the biases, in place: float32 [rows, vocab]."""
        if self._positions is not None:
            logits[self._positions] += self._values
        for row, biases in self._many.items():
            logits[row] += biases.vector(logits.shape[1], self._to_device)


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds each request's biases to its row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._to_device = copies_to(device, is_pin_memory)
        self._rows: BatchRows[_Biases] = BatchRows(_biases)
        self._placed: _PlacedBiases | None = None

    def is_argmax_invariant(self) -> bool:
        """False: a bias may make another token the most likely one."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        if self._rows.update(batch_update):
            self._placed = _PlacedBiases(self._rows, self._to_device) if self._rows else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Add the biases, in place: float32 [rows, vocab]."""
        if self._placed is not None:
            self._placed.add_to(logits)
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `SpeculativeLogitsProcessor`."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        biases = {index: self._rows[row] for index, row in rows if row in self._rows}
        if biases:
            _PlacedBiases(biases, self._to_device).add_to(logits)
        return logits

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """See `DecidesTokens`. A bias may raise a token, but forbids none."""
        biases = self._rows.get(row)
        if biases is None:
            return
        allowed.edit_values()
        if not (np.abs(biases.values) < MAX_EDITED).all():
            allowed.leave_open()


def _biases(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Biases | None:
    return _Biases(*params.bias_arrays) if params.logit_bias else None


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
