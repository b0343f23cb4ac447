"""Tells from its tokens whether a text has one of the watermarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .params import ModelFacts
from .watermark_kgw import WatermarkKgwLogitsProcessor
from .watermark_synthid import WatermarkSynthidLogitsProcessor
from .watermarks.g_values import hash_of
from .watermarks.watermark_key import WatermarkKey


@dataclass(frozen=True)
class WatermarkEvidence:
    """The result of a test for a watermark.

    Attributes:
        processor: the built-in processor whose mark was looked for.
        num_tokens: number of tokens of the text.
        num_scored: number of tokens that were scored: those with a whole context in the text that is not a repetition.
        score: `watermark_kgw`: the part of the scored tokens that is green. `watermark_synthid`: the weighted mean of
            their g-values.
        expected_score: the mean of the score of texts without the mark.
        z_score: the score's distance from it, in standard deviations of texts without the mark.
        p_value: probability of at least this z-score for a text without the mark (one-sided, normal approximation).
    """

    processor: str
    num_tokens: int
    num_scored: int
    score: float
    expected_score: float
    z_score: float
    p_value: float


def detect_watermark(
    token_ids: Sequence[int],
    key: WatermarkKey,
    processor: str = WatermarkKgwLogitsProcessor.name,
    params: Mapping[str, Any] | None = None,
    *,
    vocab_size: int,
) -> WatermarkEvidence:
    """Test whether a text was generated with a watermark.

    Args:
        token_ids: the text's tokens, without its prompt.
        key: the operator's.
        processor: `watermark_kgw` or `watermark_synthid`.
        params: the parameters with which it was generated.
        vocab_size: number of columns of the model's logits.

    Raises:
        ValueError: there is no such watermark, a parameter is invalid, or a token is outside the vocabulary.
    """
    outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary (0 to {vocab_size - 1})")
    model = _VocabularyOnly(vocab_size)
    if processor == WatermarkKgwLogitsProcessor.name:
        return _detect_green_tokens(token_ids, WatermarkKgwLogitsProcessor(key), params, model)
    if processor == WatermarkSynthidLogitsProcessor.name:
        return _detect_tournaments(token_ids, WatermarkSynthidLogitsProcessor(key), params, model)
    known = f"{WatermarkKgwLogitsProcessor.name}, {WatermarkSynthidLogitsProcessor.name}"
    raise ValueError(f"no watermark is named {processor[:80]!r}; there are {known}")


@dataclass(frozen=True)
class _VocabularyOnly:
    """The facts of a model of which only the size of its vocabulary is known."""

    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    tokenizer: Any = None


def _detect_green_tokens(
    token_ids: Sequence[int],
    processor: WatermarkKgwLogitsProcessor,
    params: Mapping[str, Any] | None,
    model: ModelFacts,
) -> WatermarkEvidence:
    """Count the green tokens, each pair of a context and a token once (Kirchenbauer et al., section 2 and appendix)."""
    wanted = processor.prepare(params, model)
    width, ratio = wanted.params.context_width, wanted.params.greenlist_ratio
    if wanted.params.seeding_scheme == "lefthash":
        ratio = int(model.vocab_size * ratio) / model.vocab_size
    windows = dict.fromkeys(_windows(token_ids, width + 1))
    contexts, tokens = [window[:-1] for window in windows], [window[-1] for window in windows]
    green = wanted.lists.are_green(contexts, tokens, wanted.params.greenlist_ratio)
    weights = np.ones(len(green))
    return _evidence(processor.name, len(token_ids), len(green), green, weights, ratio)


def _detect_tournaments(
    token_ids: Sequence[int],
    processor: WatermarkSynthidLogitsProcessor,
    params: Mapping[str, Any] | None,
    model: ModelFacts,
) -> WatermarkEvidence:
    """Compute the weighted mean of the g-values of tokens with a new context (Dathathri et al., appendix A).

    Tokens may share a bit of the table. So the bits are counted, each with the sum of its weights.
    """
    tournament = processor.prepare(params, model)
    depth, length = tournament.params.depth, tournament.params.ngram_len
    first = {window[:-1]: window[-1] for window in reversed([*_windows(token_ids, length)])}
    indices = tournament.g_values.table_indices([hash_of(context) for context in first], [*first.values()])
    layer_weights = np.linspace(10.0, 1.0, depth) if depth > 1 else np.ones(1)
    weights = np.zeros(len(tournament.g_values.table))
    np.add.at(weights, indices, np.broadcast_to(layer_weights, indices.shape))
    return _evidence(processor.name, len(token_ids), len(first), tournament.g_values.table, weights, 0.5)


def _windows(token_ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
    """Return the token sequences of a length in a text, in order."""
    return [tuple(token_ids[first : first + length]) for first in range(len(token_ids) - length + 1)]


def _evidence(
    processor: str,
    num_tokens: int,
    num_scored: int,
    bits: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    expected: float,
) -> WatermarkEvidence:
    """Return the result of the test that bits, independent and 1 with a probability, have a weighted mean above it."""
    total = weights.sum()
    if not total:
        return WatermarkEvidence(processor, num_tokens, 0, math.nan, expected, 0.0, 1.0)
    score = float((bits * weights).sum() / total)
    deviation = math.sqrt(expected * (1 - expected) * float((weights**2).sum())) / total
    z_score = float((score - expected) / deviation)
    return WatermarkEvidence(
        processor, num_tokens, num_scored, score, expected, z_score, 0.5 * math.erfc(z_score / math.sqrt(2))
    )
