"""Sampling records of outputs, from the masks of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from logitship.client.sampling_record import BITS, KEPT, REMOVED, SamplingEdits, SamplingRecord
from logitship.sampler.ops.sampling_masks import RowMask, SamplingEdit


def sampling_record(
    temperature: float, vocab_size: int, token_ids: Sequence[int], masks: Sequence[RowMask], start: int = 0
) -> SamplingRecord:
    """Return the record of some tokens and their masks.

    Args:
        temperature: of the request.
        vocab_size: number of tokens of the vocabulary.
        token_ids: the tokens.
        masks: one per token.
        start: number of tokens of the output before these.
    """
    return SamplingRecord(
        vocab_size,
        np.array(token_ids, np.int64),
        _concatenated([mask.logprobs for mask in masks], np.float32),
        np.array([mask.form for mask in masks], np.uint8),
        np.array([0 if mask.form == BITS else len(mask.tokens) for mask in masks], np.int64),
        _concatenated([mask.tokens for mask in masks if mask.form == KEPT], np.int64),
        _concatenated([mask.tokens for mask in masks if mask.form == REMOVED], np.int64),
        _concatenated([mask.tokens for mask in masks if mask.form == BITS], np.uint8).reshape(-1, -(-vocab_size // 8)),
        temperature or 1.0,
        start,
        sampling_edits([mask.edits for mask in masks]),
    )


def sampling_edits(of_tokens: Sequence[Sequence[SamplingEdit]]) -> SamplingEdits:
    """Return the edits of some tokens as one record.

    Args:
        of_tokens: those of each token, in order.
    """
    placed = [(position, edit) for position, edits in enumerate(of_tokens) for edit in edits]
    return SamplingEdits(
        np.array([position for position, _ in placed], np.int64),
        np.array([edit.kind for _, edit in placed], np.uint8),
        np.array([len(edit.tokens) for _, edit in placed], np.int64),
        _concatenated([edit.tokens for _, edit in placed], np.int64),
        _concatenated([edit.values for _, edit in placed], np.float32),
    )


def _concatenated(arrays: Sequence[Any], dtype: type[np.generic]) -> Any:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
