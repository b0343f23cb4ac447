"""Top-k and top-p sampling without sorting the vocabulary.

Everything refers to one *ranking* of a row's tokens: descending logits, then ascending token ids.

- Top-k keeps every token whose logit is at least the k-th largest one: all tokens of a tie, as in vLLM and Hugging
  Face.
- Top-p (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751) then keeps the shortest prefix of the ranking whose
  share of the total is at least p, including the token that reaches it: at least one token. Of a tie at the border it
  keeps the lower ids. Without top-k the total is 1, the sum of the softmax.
- Sampling inverts the cumulative distribution of the kept tokens, in the same ranking.

So the token is a function of the row, the parameters and one random number. Two implementations give the same token for
every number: `sample_from_candidates` reads only the most likely tokens and reports if they do not decide, and
`sample_from_all` reads the row's whole vocabulary.

Probabilities are integer weights, see `sample_tokens`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import neg
from typing import NamedTuple

import numpy as np
import torch

from logitship.sampler.device_tensor import copies_to, to_cpu
from logitship.sampler.sampling_params import SamplingParams

from .candidates import row_candidates, top_candidates
from .sample_tokens import UNIT_WEIGHT, integer_weights

_WIDTHS = (64, 512)
"""Numbers of most likely tokens to try before the whole vocabulary."""

_BUCKETS = 2048
"""Number of buckets in a histogram of logits."""
_DEPTH = 32.0
"""Range of a histogram in nats below the largest logit. Tokens below it weigh less by a factor of 1e-14."""
_SORTED_AT_MOST = 1024
"""Maximum number of tokens that are sorted."""
_RANKED_FIRST = 512
"""Number of most likely tokens that are sorted before the whole vocabulary is."""


@dataclass(frozen=True)
class CandidateSample:
    """Result of sampling from candidates.

    Attributes:
        position: the sampled candidate; None if not all kept tokens may be among the candidates.
        candidates_needed: minimum number of candidates that are needed to decide.
        num_kept: number of candidates that top-k and top-p keep: the first ones.
    """

    position: int | None
    candidates_needed: float = 0
    num_kept: int = 0


class KeptTokens(NamedTuple):
    """The tokens of a row that top-k and top-p keep.

    Attributes:
        token_ids: the tokens, by their ranking.
        weights: their `integer_weights`.
    """

    token_ids: list[int]
    weights: list[int]


def sample_from_candidates(
    logits: Sequence[float], weights: Sequence[int], complete: bool, top_k: int, top_p: float, uniform: float
) -> CandidateSample:
    """Apply top-k, then top-p, to the most likely tokens of a row, and sample if these tokens are enough to decide.

    Works on Python numbers: there are few, and many small array operations cost several times more.

    Args:
        logits: logits of the first tokens of the ranking, any number; all tokens of a tie or none.
        weights: their `integer_weights`.
        complete: True if all other tokens have weight 0.
        top_k: 0 for all tokens.
        top_p: above 0 and at most 1.
        uniform: in [0, 1).
    """
    kept, total = len(logits), UNIT_WEIGHT
    if kept < max(1, top_k) and not complete:
        return CandidateSample(None, max(1, top_k))
    sums = list(accumulate(weights))
    if top_k > 0:
        if top_k < kept:
            kept = bisect_right(logits, -logits[top_k - 1], lo=top_k, key=neg)
            del sums[kept:]
        total = sums[-1]
    border = kept - 1
    if top_p < 1:
        needed = max(1, math.ceil(total * top_p))
        border = bisect_left(sums, needed)
        if border == kept:
            if top_k == 0 and not complete:
                # No token beyond the candidates weighs more than the last one.
                return CandidateSample(None, kept + (needed - sums[-1]) / max(1, weights[-1]))
            border = kept - 1
    elif top_k == 0 and not complete:
        return CandidateSample(None, math.inf)
    return CandidateSample(bisect_right(sums, int(uniform * sums[border])), num_kept=border + 1)


def sample_from_all(logits: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float, uniform: float) -> int:
    """Apply top-k, then top-p, to the whole vocabulary of one row, and sample.

    Args:
        logits: float32 [vocab], the largest of them finite.
        weights: int64 [vocab], their `integer_weights`.
        top_k: 0, or the vocabulary's size and more, for all tokens.
        top_p: above 0 and at most 1.
        uniform: in [0, 1).

    Returns:
        A token id.
    """
    total = UNIT_WEIGHT
    if 0 < top_k < len(logits):
        kth, _ = _RankedSums(logits, torch.ones_like(weights)).first_above(top_k - 1)
        weights = weights.masked_fill(logits < logits[kth], 0)
        total = int(weights.sum())
    sums = _RankedSums(logits, weights)
    kept_weight = sums.total
    if top_p < 1:
        needed = max(1, math.ceil(total * top_p))
        if needed < kept_weight:
            _, kept_weight = sums.first_above(needed - 1)
    token, _ = sums.first_above(int(uniform * kept_weight))
    return token


def removes_tokens(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether top-k or top-p of a request may remove a token."""
    return 0 < params.top_k < vocab_size or params.top_p < 1


def kept_tokens(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return a mask of the tokens of one row that top-k and top-p keep. Sampling does not need it.

    Sorts the vocabulary if top-p is below 1 and the most likely tokens do not reach it.

    Args:
        logits: float32 [vocab], the largest of them finite.
        top_k: 0 or less, or the vocabulary's size and more, for all tokens.
        top_p: above 0 and at most 1.

    Returns:
        Bool [vocab].
    """
    weights = integer_weights(logits.softmax(dim=-1))
    kept = ~logits.isneginf()
    total = UNIT_WEIGHT
    if 0 < top_k < len(logits):
        kept &= logits >= logits.topk(top_k).values[-1]
        weights = weights.masked_fill(~kept, 0)
        total = int(weights.sum())
    if top_p < 1:
        needed = max(1, math.ceil(total * top_p))
        for ranking in _rankings(logits):
            sums = weights[ranking].cumsum(dim=0)
            border = int((sums < needed).sum())
            if border < len(ranking):
                kept &= torch.zeros_like(kept).index_fill_(0, ranking[: border + 1], True)
                break
    return kept


def _rankings(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the most likely tokens of a row, then all of them, by logit, then id."""
    if len(logits) > _RANKED_FIRST:
        # Tokens that tie with the last of these may be missing, so all that tie with it are left out.
        certain = (logits > logits.topk(_RANKED_FIRST).values[-1]).nonzero().squeeze(-1)
        yield certain[logits[certain].argsort(descending=True, stable=True)]
    yield logits.argsort(descending=True, stable=True)


class _RankedSums:
    """Cumulative sums of amounts along the ranking of one row's tokens.

    A histogram of the logits finds the bucket in which a sum is reached. Only this bucket is resolved further: it is
    sorted, or gets a histogram of its own if it is large.

    Args:
        logits: float [tokens], the largest of them finite.
        amounts: int64 [tokens], not negative.
        depth: range of the histogram below the largest logit; tokens below it share the last bucket.
    """

    def __init__(self, logits: torch.Tensor, amounts: torch.Tensor, depth: float = _DEPTH) -> None:
        self._logits = logits
        self._amounts = amounts
        self._buckets = _buckets(logits, depth)
        self._cumulative = amounts.new_zeros(_BUCKETS).scatter_add_(0, self._buckets, amounts).cumsum(dim=0)

    @property
    def total(self) -> int:
        """Sum of all amounts."""
        return int(self._cumulative[-1])

    def first_above(self, amount: int) -> tuple[int, int]:
        """Return the first token of the ranking at which the cumulative sum exceeds `amount`, and the sum there.

        Args:
            amount: less than `total`.
        """
        bucket = int(torch.searchsorted(self._cumulative, amount, right=True))
        before = int(self._cumulative[bucket - 1]) if bucket > 0 else 0
        inside = (self._buckets == bucket).nonzero().squeeze(-1)
        place, reached = _first_above(self._logits[inside], self._amounts[inside], amount - before)
        return int(inside[place]), before + reached


def _first_above(logits: torch.Tensor, amounts: torch.Tensor, amount: int) -> tuple[int, int]:
    """Find the token as `_RankedSums.first_above` does, among the tokens of one bucket in the order of their ids.

    Returns:
        Position within the bucket, and the sum there.
    """
    if len(logits) <= _SORTED_AT_MOST:
        order = logits.argsort(descending=True, stable=True)
        place, reached = _first_sum_above(amounts[order], amount)
        return int(order[place]), reached
    if logits.amin() < logits.amax():
        # float64 can divide even the narrowest and the widest span of float32.
        return _RankedSums(logits.to(torch.float64), amounts, depth=math.inf).first_above(amount)
    return _first_sum_above(amounts, amount)


def _first_sum_above(amounts: torch.Tensor, amount: int) -> tuple[int, int]:
    sums = amounts.cumsum(dim=0)
    place = int(torch.searchsorted(sums, amount, right=True))
    return place, int(sums[place])


def _buckets(logits: torch.Tensor, depth: float) -> torch.Tensor:
    """Return each token's bucket, int64 of the same shape: equal logits share one, larger logits come first.

    The buckets divide the range from the largest logit down to the least finite one, or to `depth` below it, evenly. So
    the two ends never share a bucket, unless they are too close for the dtype.
    """
    largest = logits.amax()
    least = logits.clamp(min=largest - depth).amin() if depth < math.inf else logits[logits.isfinite()].amin()
    span = float(largest) - float(least)
    scale = min((_BUCKETS - 1) / span, torch.finfo(logits.dtype).max) if span > 0 else 1.0
    return (largest - logits).mul_(scale).clamp_(max=_BUCKETS - 1).to(torch.int64)


def top_k_top_p_sample(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    uniform: Sequence[float],
    kept: dict[int, KeptTokens | None] | None = None,
) -> torch.Tensor:
    """Sample one token per row from those that top-k and top-p keep.

    Tries the most likely tokens first, and reads the whole vocabulary only in rows where these do not decide.

    Args:
        logits: float32 [rows, vocab].
        probabilities: float32 [rows, vocab], their softmax.
        top_k: of each row; 0, or the vocabulary's size and more, for all tokens.
        top_p: of each row, above 0 and at most 1.
        uniform: of each row, in [0, 1).
        kept: its keys are rows; they get the tokens that are kept, unless these are only known by reading all of them.

    Returns:
        int64 [rows]; never a token of probability 0.
    """
    kept = {} if kept is None else kept
    vocab_size = logits.shape[-1]
    settings = [(k if k < vocab_size else 0, p, number) for k, p, number in zip(top_k, top_p, uniform, strict=True)]
    tokens = [0] * len(settings)
    # Undecided rows, each with the minimum number of candidates that it needs.
    undecided: dict[int, float] = {row: k for row, (k, _, _) in enumerate(settings)}
    for width in _WIDTHS:
        rows = [row for row, needed in undecided.items() if needed <= width]
        for row, candidates in zip(rows, _candidates(logits, probabilities, rows, width), strict=True):
            sample = sample_from_candidates(candidates.logits, candidates.weights, candidates.complete, *settings[row])
            if sample.position is None:
                undecided[row] = sample.candidates_needed
                continue
            tokens[row] = candidates.token_ids[sample.position]
            del undecided[row]
            if row in kept:
                of_row = slice(sample.num_kept)
                kept[row] = KeptTokens(candidates.token_ids[of_row], candidates.weights[of_row])
    for row in undecided:
        tokens[row] = sample_from_all(logits[row], integer_weights(probabilities[row]), *settings[row])
    return copies_to(logits.device)(np.array(tokens))


class _Candidates(NamedTuple):
    """The most likely tokens of a row, as `sample_from_candidates` takes them."""

    token_ids: list[int]
    logits: list[float]
    weights: list[int]
    complete: bool


def _candidates(
    logits: torch.Tensor, probabilities: torch.Tensor, rows: list[int], width: int
) -> Iterator[_Candidates]:
    """Yield the most likely tokens of some rows, about `width` of each."""
    if logits.device.type == "cpu":
        yield from (_candidates_of_row(logits[row], probabilities[row], width) for row in rows)
    elif rows:
        index = copies_to(logits.device)(np.array(rows))
        values, token_ids = top_candidates(logits[index], width)
        weights = integer_weights(probabilities[index].gather(-1, token_ids))
        # Tokens that tie with the last one may be missing.
        certain = (values > values[:, -1:]).sum(dim=-1)
        found = (each.tolist() for each in to_cpu(token_ids, values, weights, certain[:, None]))
        for of_row, row_values, row_weights, (count,) in zip(*found, strict=True):
            if row_weights[-1] == 0 or len(of_row) == logits.shape[-1]:
                yield _Candidates(of_row, row_values, row_weights, True)
            else:
                yield _Candidates(of_row[:count], row_values[:count], row_weights[:count], False)


def _candidates_of_row(logits: torch.Tensor, probabilities: torch.Tensor, width: int) -> _Candidates:
    values = logits.numpy()
    token_ids, all_finite = row_candidates(values, width)
    # The products are exact, see `integer_weights`.
    weights = [int(probability * UNIT_WEIGHT) for probability in probabilities.numpy()[token_ids].tolist()]
    complete = all_finite or weights[-1:] == [0]
    return _Candidates(token_ids.tolist(), values[token_ids].tolist(), weights, complete)
