"""Stateless random numbers: a function of a request's seed and the token's position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)
"""Increments of the two words of the key in each round: [rounds, 2, 1]."""
_BATCH_SIZE = 256
"""So many numbers take NumPy hardly longer than one."""
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


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


def uniform_numbers(seeds: _UInt64Array, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each seed and position.

    Each number depends only on its own seed and position, so a request gets the same numbers in any batch.

    Args:
        seeds: uint64 [n].
        positions: int64 [n]: number of output tokens before the one to be sampled.

    Returns:
        float64 [n].
    """
    position = positions.astype(np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack([position & _LOW, position >> _32, zero, zero])
    high, low, _, _ = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _32]))
    bits = ((high << _32) | low) >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform


class UniformNumbers:
    """`uniform_numbers` for sequences that mostly grow by one token per step, computed for several positions at once.

    Args:
        seeds: uint64 [n].
    """

    def __init__(self, seeds: _UInt64Array) -> None:
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
            self._computed = uniform_numbers(self._seeds, upcoming).reshape(-1, len(self._ahead))
        numbers: npt.NDArray[np.float64] = self._computed[self._rows, ahead]
        return numbers
