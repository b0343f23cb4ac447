from __future__ import annotations

import numpy as np
import pytest

from logitship.sampler.ops.random_numbers import UniformNumbers, philox4x32, uniform_numbers

# Known answers from Random123, the authors' implementation (kat_vectors, philox4x32 with 10 rounds).
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def test_number_depends_only_on_seed_and_position() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    positions = rng.integers(0, 2**40, 50)
    together = uniform_numbers(seeds, positions)
    alone = [uniform_numbers(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone
    assert len(set(alone)) == 50


def test_range_and_uniformity() -> None:
    for seeds, positions in [
        (np.zeros(100_000, dtype=np.uint64), np.arange(100_000)),
        (np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64)),
    ]:
        numbers = uniform_numbers(seeds, positions)
        assert numbers.dtype == np.float64
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed, _ = np.histogram(numbers, bins=100, range=(0, 1))
        # Chi-square with 99 degrees of freedom: mean 99, standard deviation 14.
        assert ((observed - 1000) ** 2 / 1000).sum() < 99 + 5 * 14
        # Adjacent numbers are not correlated: one standard deviation is 0.003.
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.016


def test_empty_input() -> None:
    assert uniform_numbers(np.array([], dtype=np.uint64), np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_precomputed_numbers_are_the_same(count: int) -> None:
    rng = np.random.default_rng(count)
    seeds = rng.integers(0, 2**64, count, dtype=np.uint64)
    numbers = UniformNumbers(seeds)
    positions = rng.integers(0, 2**40, count)
    for step in range(400):
        assert numbers.at(positions).tolist() == uniform_numbers(seeds, positions).tolist()
        # Mostly one token each; sometimes several, none, or a step back.
        positions = positions + (rng.integers(-3, 5, count) if step % 7 == 6 else 1)
