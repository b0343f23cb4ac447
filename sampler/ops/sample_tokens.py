"""Random sampling of the next token, and the random numbers.

Random sampling inverts the cumulative distribution at one uniform number per row. It is batch-invariant: it reads only
its own row, and its sums are exact, so the same row, parameters and number always give the same token. The numbers are
stateless: a function of a request's seed and the token's position.

Probabilities become integer weights in units of 2**-60. Integer sums do not depend on their order, so a row's token
cannot depend on how a kernel splits its work, and thus not on the other rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .rows import row_parts

_UInt64Array = npt.NDArray[np.uint64]
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)
"""Increments of the two words of the key in each round: [rounds, 2, 1]."""

UNIT_WEIGHT = 2**60
"""The weight of probability 1."""

_BATCH_SIZE = 256
"""So many numbers take NumPy hardly longer than one."""

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_PART_SIZE = 2**17
"""Number of weights of a [rows, vocab] matrix that are processed at a time."""

_BLOCK = 256
"""Tokens per block, whose weights are summed before a token is located within a block."""


def philox4x32(counter: _UInt64Array, key: _UInt64Array) -> _UInt64Array:
    """Compute Philox4x32-10, a counter-based generator.

    Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".

    Args:
        counter: uint64 [4, n], each element a 32-bit word.
        key: uint64 [2, n], each element a 32-bit word.

    Returns:
        uint64 [4, n], each element a 32-bit word.
    """
    # Words 0 and 2 are multiplied, 1 and 3 are mixed in: two arrays [2, n] halve the number of operations.
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = (multiplied * _MULTIPLIERS)[::-1]
        multiplied, mixed = (product >> _32) ^ mixed ^ round_key, product & _LOW
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]])


def uniform_numbers(seeds: _UInt64Array, positions: npt.NDArray[np.int64], stream: int = 0) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each seed and position.

    Each number depends only on its own seed and position, so a request gets the same numbers in any batch.

    Args:
        seeds: uint64 [n].
        positions: int64 [n]: number of output tokens before the one to be sampled.
        stream: from 0 to 2^32 - 1; those of two streams are independent. Tokens are sampled with stream 0.

    Returns:
        float64 [n].
    """
    position = positions.astype(np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack([position & _LOW, position >> _32, zero + np.uint64(stream), zero])
    high, low, _, _ = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _32]))
    bits = ((high << _32) | low) >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform


class UniformNumbers:
    """`uniform_numbers` for sequences that mostly grow by one token per step, computed for several positions at once.

    Args:
        seeds: uint64 [n].
        stream: see `uniform_numbers`.
    """

    def __init__(self, seeds: _UInt64Array, stream: int = 0) -> None:
        self._stream = stream
        self._rows = np.arange(len(seeds))
        self._ahead = np.arange(max(1, _BATCH_SIZE // max(1, len(seeds))))
        self._seeds = np.repeat(seeds, len(self._ahead))
        self._first = np.zeros(len(seeds), dtype=np.int64)
        self._computed = np.empty((len(seeds), 0))

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the number at each sequence's position, int64 [n]: float64 [n]."""
        ahead = positions - self._first
        if not ((ahead >= 0) & (ahead < self._computed.shape[1])).all():
            self._first, ahead = positions, np.zeros_like(positions)
            upcoming = (positions[:, None] + self._ahead).ravel()
            self._computed = uniform_numbers(self._seeds, upcoming, self._stream).reshape(-1, len(self._ahead))
        numbers: npt.NDArray[np.float64] = self._computed[self._rows, ahead]
        return numbers


def integer_weights(probabilities: torch.Tensor) -> torch.Tensor:
    """Convert probabilities, float32, to int64 weights of the same shape. Exact down to 2**-60; below that, 0."""
    # The factor is a power of two, so the product is exact. 60 bits leave headroom for sums that rounding put above 1.
    return (probabilities * float(UNIT_WEIGHT)).to(torch.int64)


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
