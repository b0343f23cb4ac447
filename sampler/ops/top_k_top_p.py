"""Which tokens top-k and top-p keep, and how much each of them weighs. Neither needs the vocabulary to be sorted.

Top-k keeps every token whose logit is at least the k-th largest one: all of a tie. Top-p (nucleus sampling, Holtzman et
al. 2020, arXiv:1904.09751) then looks at what is left in the order of descending logits, then ascending token ids. It
keeps the shortest beginning of this order whose share of the total is at least p, the token that reaches it included,
so always one token at least. Without top-k the total is 1, as softmax has it.

Probabilities become integer weights, in units of 2**-60. Integers add up to the same sum in any order, so that what a
row draws cannot depend on how a kernel splits its work, and thus not on the other rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

UNIT_WEIGHT = 2**60
"""The weight of probability 1."""

_BUCKETS = 2048
_BUCKETS_PER_NAT = 64
"""The histogram reaches 32 nats below the largest logit; what is below, a factor of 1e-14, shares the last bucket."""


def integer_weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities, float32, as int64 weights of the same shape. Exact down to 2**-60; below that, 0."""
    # A power of two as the factor: exact. 60 bits: room for a sum that float32's rounding left above 1.
    return (probabilities * float(UNIT_WEIGHT)).to(torch.int64)


@dataclass(frozen=True)
class KeptCandidates:
    """What top-k and top-p keep of some candidates.

    Attributes:
        cumulative_weights: int64 [rows, width]: weight of the candidates up to and including each, those that top-k
            drops counting 0.
        kept_weight: int64 [rows]: weight of the kept tokens, above 0. They are those at which the sum is at most this.
        decided: bool [rows]: the kept tokens are all among the candidates. Where it is False, the rest means nothing.
    """

    cumulative_weights: torch.Tensor
    kept_weight: torch.Tensor
    decided: torch.Tensor


def keep_candidates(
    logits: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> KeptCandidates:
    """Apply top-k, then top-p, to the most likely tokens of each row, if these are enough to tell.

    Args:
        logits: float32 [rows, width], in the order that `top_candidates` returns.
        weights: int64 [rows, width], their `integer_weights`.
        top_k: int64 [rows], less than width; 0 for all tokens.
        top_p: float64 [rows], above 0 and at most 1.
    """
    # Tokens that tie with the last candidate may be missing. What weighs nothing is not missed.
    complete = weights[:, -1:] == 0
    certain = complete | (logits > logits[:, -1:])

    limited = (top_k > 0)[:, None]
    kth = (top_k[:, None] - 1).clamp(min=0)
    weights = weights.masked_fill(limited & (logits < logits.gather(-1, kth)), 0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].where(limited, UNIT_WEIGHT)

    last = torch.searchsorted(cumulative, _needed_weight(total, top_p[:, None]))
    kept_weight = cumulative.gather(-1, last.clamp(max=logits.shape[-1] - 1))
    reached = last < certain.sum(dim=-1, keepdim=True)
    decided = torch.where(limited, certain.gather(-1, kth), reached | complete)
    return KeptCandidates(cumulative, kept_weight.squeeze(-1), decided.squeeze(-1))


def kept_tokens(logits: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Apply top-k, then top-p, to the whole vocabulary of one row.

    Args:
        logits: float32 [vocab], the largest of them finite.
        weights: int64 [vocab], their `integer_weights`.
        top_k: 0, or the vocabulary's size and more, for all tokens.
        top_p: above 0 and at most 1.

    Returns:
        bool [vocab]. It may be either for tokens that weigh nothing.
    """
    total = UNIT_WEIGHT
    kept = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < len(logits):
        first = _shortest_beginning(logits, torch.ones_like(weights), top_k)
        kept = logits >= logits[first].amin()
        weights = weights.masked_fill(~kept, 0)
        total = int(weights.sum())
    if top_p < 1:
        kept &= _shortest_beginning(logits, weights, max(1, math.ceil(total * top_p)))
    return kept


def _needed_weight(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The weight at which top-p stops: out of reach if `top_p` is 1."""
    needed = torch.ceil(total.to(torch.float64) * top_p).to(torch.int64).clamp(min=1)
    return needed.where(top_p < 1, torch.iinfo(torch.int64).max)


def _shortest_beginning(logits: torch.Tensor, amounts: torch.Tensor, needed: int) -> torch.Tensor:
    """The fewest tokens, in the order of the module's text, whose amounts add up to `needed`; all if none do.

    A histogram finds the bucket of logits in which that happens, so that only this bucket has to be sorted.

    Args:
        logits: float32 [vocab].
        amounts: int64 [vocab], not negative.
        needed: above 0.

    Returns:
        bool [vocab].
    """
    bucket = ((logits.amax() - logits) * _BUCKETS_PER_NAT).clamp(max=_BUCKETS - 1).to(torch.int64)
    cumulative = amounts.new_zeros(_BUCKETS).scatter_add_(0, bucket, amounts).cumsum(dim=0)
    last = int(torch.searchsorted(cumulative, needed))
    kept = bucket < last
    if last < _BUCKETS:
        inside = (bucket == last).nonzero().squeeze(-1)
        inside = inside[logits[inside].argsort(descending=True, stable=True)]
        still_needed = needed - (int(cumulative[last - 1]) if last > 0 else 0)
        kept[inside[: int(torch.searchsorted(amounts[inside].cumsum(dim=0), still_needed)) + 1]] = True
    return kept
