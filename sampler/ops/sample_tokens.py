"""Greedy and random sampling of the next token, and temperature.

Random sampling inverts the cumulative distribution at one uniform number per row. It is batch-invariant: it reads only
its own row, and its sums are exact (see `top_k_top_p`), so the same row, parameters and number always give the same
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .candidates import row_candidates, top_candidates
from .rows import row_parts
from .top_k_top_p import UNIT_WEIGHT, integer_weights, sample_from_all, sample_from_candidates

_WIDTHS = (64, 512)
"""Numbers of most likely tokens to try before the whole vocabulary."""

_PART_SIZE = 2**17
"""Number of weights of a [rows, vocab] matrix that are processed at a time."""

_BLOCK = 256
"""Tokens per block, whose weights are summed before a token is located within a block."""


def apply_temperature(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide each row by its temperature, in place.

    If a row's largest logit would exceed float32's range, the row is first shifted to a maximum of 0: the probabilities
    are the same, and a temperature close to 0 approaches the argmax instead of NaN.

    Args:
        logits: float32 [rows, vocab].
        peak: float32 [rows, 1]: each row's largest logit, finite.
        temperature: float32 [rows, 1], above 0.
    """
    scaled = peak / temperature
    # A finite sum shows at once that no row overflows. A sum of finite values that overflows only costs the check
    # below.
    if not math.isfinite(scaled.sum()):
        logits -= peak.where(~torch.isfinite(scaled), 0.0)
    logits /= temperature


def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's most likely token, the lowest id of a tie: int64 [rows] from float32 [rows, vocab]."""
    if logits.device.type == "cpu":
        # Ten times faster than torch.argmax on a CPU, which does not use vector instructions there.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def random_sample(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample one token per row from the whole distribution, in the order of token ids.

    Args:
        probabilities: float32 [rows, vocab].
        uniform: float64 [rows], in [0, 1).

    Returns:
        int64 [rows]; never a token of probability 0.
    """
    # The sums of blocks locate the token's block; only there are single weights summed.
    parts = row_parts(len(probabilities), probabilities, _PART_SIZE)
    sums = torch.cat([_block_sums(probabilities[part]) for part in parts])
    reached = sums.cumsum(dim=-1)
    # The target is below the total: `uniform` is at most 1 - 2**-53, which subtracts a whole unit in the last place,
    # and the two roundings add at most half a unit. So some sum exceeds it, and the last summand of that is not 0.
    target = (uniform[:, None] * reached[:, -1:].to(torch.float64)).to(torch.int64)
    block = torch.searchsorted(reached, target, right=True)
    target -= reached.gather(-1, block) - sums.gather(-1, block)
    first = block * _BLOCK
    token_ids = first + torch.arange(_BLOCK, device=first.device)
    last = probabilities.shape[-1] - 1
    weights = integer_weights(probabilities.gather(-1, token_ids.clamp(max=last))).masked_fill_(token_ids > last, 0)
    return (first + torch.searchsorted(weights.cumsum(dim=-1), target, right=True)).squeeze(-1)


def _block_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """Return the sums of the weights of each `_BLOCK` tokens: int64 [rows, blocks] from float32 [rows, vocab]."""
    weights = integer_weights(probabilities)
    num_whole = weights.shape[-1] // _BLOCK
    in_blocks = num_whole * _BLOCK
    sums = weights[:, :in_blocks].view(len(weights), num_whole, _BLOCK).sum(dim=-1)
    if in_blocks == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, in_blocks:].sum(dim=-1, keepdim=True)], dim=-1)


def top_k_top_p_sample(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Sample one token per row from those that top-k and top-p keep.

    Tries the most likely tokens first, and reads the whole vocabulary only in rows where these do not decide.

    Args:
        logits: float32 [rows, vocab].
        probabilities: float32 [rows, vocab], their softmax.
        top_k: int64 [rows]; 0, or the vocabulary's size and more, for all tokens.
        top_p: float64 [rows], above 0 and at most 1.
        uniform: float64 [rows], in [0, 1).

    Returns:
        int64 [rows]; never a token of probability 0.
    """
    vocab_size = logits.shape[-1]
    settings = [
        (k if k < vocab_size else 0, p, number)
        for k, p, number in zip(top_k.tolist(), top_p.tolist(), uniform.tolist(), strict=True)
    ]
    tokens = [0] * len(settings)
    # Undecided rows, each with the minimum number of candidates that it needs.
    undecided: dict[int, float] = {row: k for row, (k, _, _) in enumerate(settings)}
    for width in _WIDTHS:
        rows = [row for row, needed in undecided.items() if needed <= width]
        for row, candidates in zip(rows, _candidates(logits, probabilities, rows, width), strict=True):
            sample = sample_from_candidates(candidates.logits, candidates.weights, candidates.complete, *settings[row])
            if sample.position is None:
                undecided[row] = sample.candidates_needed
            else:
                tokens[row] = candidates.token_ids[sample.position]
                del undecided[row]
    for row in undecided:
        tokens[row] = sample_from_all(logits[row], integer_weights(probabilities[row]), *settings[row])
    return torch.tensor(tokens).to(logits.device)


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
        index = torch.tensor(rows).to(logits.device)
        values, token_ids = top_candidates(logits[index], width)
        weights = integer_weights(probabilities[index].gather(-1, token_ids))
        # Tokens that tie with the last one may be missing.
        certain = (values > values[:, -1:]).sum(dim=-1)
        on_cpu = (each.tolist() for each in (token_ids, values, weights, certain))
        for of_row, row_values, row_weights, count in zip(*on_cpu, strict=True):
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
