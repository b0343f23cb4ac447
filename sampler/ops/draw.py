"""Choosing the next token: the most likely one, or one at random.

A random draw inverts the cumulative distribution at one uniform number a row. It reads nothing but its own row, and its
sums are exact (see `top_k_top_p`): the same row, parameters and number give the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from .candidates import top_candidates
from .top_k_top_p import draw_from_all, draw_from_candidates, integer_weights

_WIDTHS = (64, 512)
"""How many of the most likely tokens are looked at, before all of them."""

_PART_SIZE = 2**17
"""How many numbers of a [rows, vocab] matrix are worked on at a time."""


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Token id of each row's largest logit, the lowest id of a tie: int64 [rows] from float32 [rows, vocab]."""
    if logits.device.type == "cpu":
        # Ten times faster than torch.argmax on a CPU, which does not use vector instructions there.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from the whole distribution, in the order of token ids.

    Args:
        probabilities: float32 [rows, vocab].
        uniform: float64 [rows], in [0, 1).

    Returns:
        int64 [rows]; never a token of probability 0.
    """
    tokens = torch.zeros_like(uniform, dtype=torch.int64)
    for part in _parts(probabilities):
        cumulative = integer_weights(probabilities[part]).cumsum(dim=-1)
        tokens[part] = _invert(cumulative, cumulative[:, -1], uniform[part]).squeeze(-1)
    return tokens


def draw_top_k_top_p(
    logits: torch.Tensor,
    probabilities: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row from those that top-k and top-p keep.

    A few of the most likely tokens mostly decide; the whole vocabulary is looked at only in rows where they don't.

    Args:
        logits: float32 [rows, vocab].
        probabilities: float32 [rows, vocab], their softmax.
        top_k: int64 [rows]; 0, or the vocabulary's size and more, for all tokens.
        top_p: float64 [rows], above 0 and at most 1.
        uniform: float64 [rows], in [0, 1).

    Returns:
        int64 [rows]; never a token of probability 0.
    """
    k, p, numbers = (tensor.cpu().numpy() for tensor in (top_k, top_p, uniform))
    tokens = np.zeros(len(logits), dtype=np.int64)
    undecided = np.ones(len(logits), dtype=np.bool_)
    # The k-th token decides only if the one after it is known to be less likely.
    candidates_needed = k + 1.0
    for width in (width for width in _WIDTHS if width < logits.shape[-1]):
        rows = np.flatnonzero(undecided & (candidates_needed <= width))
        if len(rows) > 0:
            values, token_ids, weights = _candidates(logits, probabilities, rows, width)
            drawn = draw_from_candidates(values, weights, k[rows], p[rows], numbers[rows])
            decided = np.flatnonzero(drawn.decided)
            tokens[rows[decided]] = token_ids[decided, drawn.position[decided]]
            candidates_needed[rows] = drawn.candidates_needed
            undecided[rows] = ~drawn.decided
    for row in np.flatnonzero(undecided):
        weights_of_all = integer_weights(probabilities[row])
        tokens[row] = draw_from_all(logits[row], weights_of_all, int(k[row]), float(p[row]), float(numbers[row]))
    return torch.from_numpy(tokens).to(logits.device)


def _candidates(
    logits: torch.Tensor, probabilities: torch.Tensor, rows: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Logits, token ids and weights of some rows' most likely tokens, each [rows, width], on the host."""
    index = torch.from_numpy(rows).to(logits.device)
    values, token_ids = top_candidates(take_rows(logits, index), width)
    weights = integer_weights(probabilities[index[:, None], token_ids])
    return values.cpu().numpy(), token_ids.cpu().numpy(), weights.cpu().numpy()


def _parts(matrix: torch.Tensor) -> Iterator[slice]:
    """A few rows at a time: int64 temporaries of a whole batch would not fit into a CPU's caches."""
    rows = max(1, _PART_SIZE // matrix.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`matrix[rows]`, without a copy if that is all of it. `rows`, int64 [n], is ascending without duplicates."""
    return matrix if len(rows) == len(matrix) else matrix[rows]


def _invert(cumulative: torch.Tensor, total: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index, int64 [rows, 1], of the first cumulative weight above `uniform * total`.

    There is one: a number of at most 1 - 2**-53 times a total is below the total, after both roundings too (they add
    half a unit in the last place at most, the factor takes away a whole one). And its token weighs something: the sum
    grew there.
    """
    target = (uniform * total.to(torch.float64)).to(torch.int64)
    return torch.searchsorted(cumulative, target[:, None], right=True)
