"""Which tokens top-k and top-p keep, token by token. For those who want to see it: a draw does without."""

from __future__ import annotations

import math

import torch

from .top_k_top_p import UNIT_WEIGHT, integer_weights


def kept_tokens(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The tokens of one row that may be drawn, by the rules of `top_k_top_p`.

    Sorts the vocabulary where top-p is asked for.

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
        ranking = logits.argsort(descending=True, stable=True)
        sums = weights[ranking].cumsum(dim=0)
        border = int((sums < max(1, math.ceil(total * top_p))).sum())
        kept[ranking[border + 1 :]] = False
    return kept
