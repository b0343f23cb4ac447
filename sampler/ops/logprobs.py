"""Log-probabilities of tokens for responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from .candidates import top_candidates


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities (natural logarithm) at one position.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability; -inf for a masked token.
        rank: 1 plus the number of more likely tokens.
        top: (token id, log-probability) of the k most likely tokens, most likely first, ties by ascending id. Masked
            tokens come last, with -inf.
        requested: the same of the tokens that the row names, in its order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    requested: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    top: Sequence[int],
    requested: Sequence[Sequence[int]] | None = None,
) -> list[RowLogprobs]:
    """Look up tokens in the distributions of their rows.

    For sampled tokens, and for those of a prompt: each row of `logits` then predicts its token.

    Args:
        logits: float32 [rows, vocab].
        token_ids: one token per row.
        top: number of most likely tokens that each row asks for; limited to the vocabulary.
        requested: tokens that each row names; None: none.

    Returns:
        One record per row.
    """
    return look_up(logits.log_softmax(dim=-1), token_ids, top, requested)


def look_up(
    logprobs: torch.Tensor,
    token_ids: Sequence[int],
    top: Sequence[int],
    requested: Sequence[Sequence[int]] | None = None,
) -> list[RowLogprobs]:
    """Look up tokens as `token_logprobs` does, from log-probabilities instead of logits: float32 [rows, vocab]."""
    if not token_ids:
        return []
    tokens = torch.tensor(token_ids, dtype=torch.int64).to(logprobs.device)
    chosen = logprobs.gather(-1, tokens[:, None])
    top_values, top_ids = _most_likely(logprobs, max(top))
    ranks = _ranks(logprobs, chosen, top_values)
    return [
        RowLogprobs(token_id, logprob, rank, tuple(zip(ids[:k], values[:k], strict=True)), named)
        for token_id, logprob, rank, ids, values, k, named in zip(
            token_ids,
            chosen.squeeze(-1).tolist(),
            ranks,
            top_ids.tolist(),
            top_values.tolist(),
            top,
            _named(logprobs, requested or [()] * len(token_ids)),
            strict=True,
        )
    ]


def _named(logprobs: torch.Tensor, requested: Sequence[Sequence[int]]) -> list[tuple[tuple[int, float], ...]]:
    """Return (token id, log-probability) of the tokens that each row names."""
    rows = [row for row, tokens in enumerate(requested) for _ in tokens]
    if not rows:
        return [()] * len(requested)
    tokens = [token for each in requested for token in each]
    places = torch.tensor([rows, tokens], dtype=torch.int64).to(logprobs.device)
    values = iter(zip(tokens, logprobs[places[0], places[1]].tolist(), strict=True))
    return [tuple(islice(values, len(each))) for each in requested]


def _ranks(logprobs: torch.Tensor, chosen: torch.Tensor, top_values: torch.Tensor) -> list[int]:
    """Return each row's rank: 1 plus the number of values above the row's chosen one.

    Args:
        logprobs: float32 [rows, vocab].
        chosen: float32 [rows, 1].
        top_values: float32 [rows, any], the largest values of each row.
    """
    above = (top_values > chosen).sum(dim=-1).tolist()
    # If one of the largest values is not above it, no other value is.
    further = [row for row, count in enumerate(above) if count == top_values.shape[-1]]
    if further:
        # A view if these are all rows.
        rows = slice(None) if len(further) == len(above) else further
        counts = _count_above(logprobs[rows], chosen[rows]).tolist()
        for row, count in zip(further, counts, strict=True):
            above[row] = count
    return [count + 1 for count in above]


def _count_above(logprobs: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Count the values of each row above the row's limit, [rows, 1]: int64 [rows]."""
    if logprobs.device.type == "cpu":
        # Up to ten times faster than PyTorch's sum, which first converts each bool.
        rows = zip(logprobs.numpy(), limits.numpy(), strict=True)
        return torch.tensor([np.count_nonzero(row > limit) for row, limit in rows])
    return (logprobs > limits).sum(dim=-1)


def _most_likely(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` of each row by descending value, then ascending id. Resolves ties at the end too."""
    if count == 0:
        return logprobs[:, :0], torch.empty(len(logprobs), 0, dtype=torch.int64)
    # One more than requested shows whether the last one ties with tokens that were left out.
    values, token_ids = top_candidates(logprobs, count + 1)
    if values.shape[-1] > count:
        tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(-1)
        if len(tied) > 0:
            whole_values, whole_ids = top_candidates(logprobs[tied], logprobs.shape[-1])
            values[tied], token_ids[tied] = whole_values[:, : count + 1], whole_ids[:, : count + 1]
    return values[:, :count], token_ids[:, :count]
