"""Sampling masks: which tokens could be sampled in place of each output token, and how likely they were.

A trainer needs them to compute the log-probability of the token as the sampler did. Without them, the probability of
the removed tokens is missing from its sum (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from logitship.client.errors import LogitshipError
from logitship.client.sampling_record import BITS, KEPT, REMOVED, token_dtype
from logitship.sampler.row_errors import SamplingMasksTooLargeError, SamplingMaskTooLongError
from logitship.sampler.sampling_params import MAX_LISTED, SamplingParams

from .sample_tokens import UNIT_WEIGHT
from .sampler_op import SamplerOp, SamplingRow
from .top_k_top_p import KeptTokens, kept_tokens, removes_tokens

MAX_BYTES = 2**26
"""Most bytes of the packed masks and edits of one sequence."""


class SamplingEdit(NamedTuple):
    """An edit of the logits of tokens that could be sampled.

    Attributes:
        kind: see `SamplingEdits`.
        tokens: int64 [any]; empty: all of them.
        values: float32: one for each token, or one for all.
    """

    kind: int
    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class RowMask:
    """Sampling mask of one output token.

    Attributes:
        form: what `tokens` holds, see `SamplingRecord`.
        tokens: `KEPT`: the tokens that could be sampled, the most likely first. `REMOVED`: all others, ascending. Both
            int64 [any]. `BITS`: uint8 [ceil(vocab / 8)], a bit per token, set if it could be sampled; the lowest bit of
            a byte comes first.
        logprobs: float32 [1]: the log-probability (natural logarithm) of the output token under the distribution that
            it was sampled from; or float32 [any]: those of the tokens in `tokens`.
        edits: what was done to the model's logits of these tokens, in order, before the temperature, if requested.
    """

    form: int
    tokens: npt.NDArray[Any]
    logprobs: npt.NDArray[np.float32]
    edits: tuple[SamplingEdit, ...] = ()

    def could_be_sampled(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Return the tokens that could be sampled."""
        if self.form == KEPT:
            return self.tokens
        if self.form == BITS:
            return np.flatnonzero(np.unpackbits(self.tokens, count=vocab_size, bitorder="little"))
        return np.flatnonzero(~_is_in(self.tokens, vocab_size))


@dataclass
class MaskedRow:
    """A request that asks for sampling masks.

    Attributes:
        num_bytes: size of its packed masks and edits so far.
    """

    params: SamplingParams
    num_bytes: int = 0

    def add_bytes(self, count: int) -> None:
        """Count bytes.

        Raises:
            SamplingMasksTooLargeError: they are too many.
        """
        self.num_bytes += count
        if self.num_bytes > MAX_BYTES:
            raise SamplingMasksTooLargeError(MAX_BYTES)


class StepMasks:
    """The sampling masks of the rows of one step.

    Args:
        rows: the rows that ask, by place among the step's rows.
        vocab_size: number of columns of the logits.
    """

    def __init__(self, rows: Mapping[int, MaskedRow], vocab_size: int) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self._kept: dict[int, KeptTokens] = {}

    def keep(self, kept: Mapping[int, KeptTokens]) -> None:
        """Record the tokens of some random rows, as sampling has found them."""
        self._kept |= kept

    def finish(
        self, logits: torch.Tensor, token_ids: Sequence[int], faults: dict[int, LogitshipError], deferred: set[int]
    ) -> list[RowMask | None]:
        """Return the masks.

        Args:
            logits: float32 [rows, vocab]: for random rows, those that the softmax was taken of.
            token_ids: sampled token of each row.
            faults: faults by row; gets those of rows whose masks are too large.
            deferred: rows without a token.

        Returns:
            One entry per row; None for rows that do not ask, and those without a token.
        """
        masks: list[RowMask | None] = [None] * len(token_ids)
        for row, state in self.rows.items():
            if row in faults or row in deferred:
                continue
            try:
                masks[row] = self._mask(row, state, logits, token_ids[row])
            except (SamplingMaskTooLongError, SamplingMasksTooLargeError) as error:
                faults[row] = error
        return masks

    def with_edits(self, row: int, mask: RowMask, edits: tuple[SamplingEdit, ...]) -> RowMask:
        """Return a row's mask with the edits of its logits.

        Raises:
            SamplingMasksTooLargeError: they are too large together with the sequence's masks.
        """
        id_bytes = token_dtype(self.vocab_size).itemsize
        size = sum(5 + id_bytes * (1 + len(each.tokens)) + each.values.nbytes for each in edits)
        self.rows[row].add_bytes(size)
        return replace(mask, edits=edits)

    def _mask(self, row: int, state: MaskedRow, logits: torch.Tensor, token_id: int) -> RowMask:
        params = state.params
        if params.greedy:
            tokens, logprobs = np.array([token_id]), np.zeros(1, np.float32)
        elif row in self._kept:
            tokens, logprobs = _of_weights(self._kept[row])
        else:
            tokens, logprobs = _of_logits(logits[row], params)
        if params.sampling_mask_format == "lists":
            if len(tokens) > MAX_LISTED:
                raise SamplingMaskTooLongError(len(tokens), MAX_LISTED)
            is_support = params.sampling_logprobs_mode == "support"
            return RowMask(KEPT, tokens, logprobs if is_support else logprobs[tokens == token_id])
        mask = _packed(tokens, logprobs[tokens == token_id], self.vocab_size)
        state.add_bytes(_num_bytes(mask, self.vocab_size))
        return mask


class SamplingMasks(SamplerOp[MaskedRow, Mapping[int, MaskedRow]]):
    """Records the sampling masks that requests ask for."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self._vocab_size = vocab_size

    def new_state(self, row: SamplingRow) -> MaskedRow | None:
        """Return the state of a request that asks for sampling masks."""
        return MaskedRow(row.params) if row.params.return_sampling_mask else None

    def begin(self, rows: Sequence[int] | None) -> StepMasks:
        """Return what records the masks of a step."""
        return StepMasks(self.prepared(rows) or {}, self._vocab_size)


def packed_mask(logits: torch.Tensor, token_id: int) -> RowMask:
    """Return the packed mask of a token that was sampled from the softmax of a row's logits, float32 [vocab].

    Raises:
        ValueError: it cannot have been.
    """
    tokens, logprobs = _unmasked(logits, ~logits.isneginf())
    if token_id not in tokens:
        raise ValueError(f"token {token_id} cannot have been sampled from these logits")
    return _packed(tokens, logprobs[tokens == token_id], len(logits))


def _of_weights(kept: KeptTokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the tokens that can be sampled, the most likely first, and their log-probabilities."""
    weights = np.array(kept.weights, np.float64) / UNIT_WEIGHT
    with np.errstate(divide="ignore"):  # a token whose probability is below 2**-60 is kept, and never sampled
        logprobs = np.log(weights) - np.log(weights.sum())
    return np.array(kept.token_ids), logprobs.astype(np.float32)


def _of_logits(logits: torch.Tensor, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Do the same from the logits of one row, float32 [vocab]. Reads the whole vocabulary."""
    kept = kept_tokens(logits, params.top_k, params.top_p) if removes_tokens(params, len(logits)) else None
    return _unmasked(logits, ~logits.isneginf() if kept is None else kept)


def _unmasked(logits: torch.Tensor, kept: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    values = logits.masked_fill(~kept, -torch.inf).double().log_softmax(dim=-1).cpu().numpy()
    tokens = np.flatnonzero(kept.cpu().numpy())
    if len(tokens) <= MAX_LISTED:
        tokens = tokens[np.argsort(-values[tokens], kind="stable")]
    return tokens, values[tokens].astype(np.float32)


def _packed(tokens: npt.NDArray[np.int64], logprob: npt.NDArray[np.float32], vocab_size: int) -> RowMask:
    """Return the mask in its shortest form."""
    width, num_bits = token_dtype(vocab_size).itemsize, -(-vocab_size // 8)
    num_removed = vocab_size - len(tokens)
    if width * min(len(tokens), num_removed) > num_bits:
        bits = np.packbits(_is_in(tokens, vocab_size), bitorder="little")
        return RowMask(BITS, bits, logprob)
    if len(tokens) <= num_removed:
        return RowMask(KEPT, tokens, logprob)
    return RowMask(REMOVED, np.flatnonzero(~_is_in(tokens, vocab_size)), logprob)


def _is_in(tokens: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(vocab_size, bool)
    mask[tokens] = True
    return mask


def _num_bytes(mask: RowMask, vocab_size: int) -> int:
    return len(mask.tokens) * (1 if mask.form == BITS else token_dtype(vocab_size).itemsize)
