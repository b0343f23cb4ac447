from __future__ import annotations

import numpy as np
import pytest
import torch

from logitship.sampler.ops.sample_tokens import (
    UNIT_WEIGHT,
    UniformNumbers,
    integer_weights,
    philox4x32,
    random_sample,
    uniform_numbers,
)
from logitship.sampler.ops.top_k_top_p import top_k_top_p_sample
from tests.helpers.random_cases import random_seeds

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


ALMOST_ONE = 1 - 2.0**-53


def test_random_sample_inverts_distribution_in_token_order() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, ALMOST_ONE], dtype=torch.float64)
    assert random_sample(probabilities.expand(6, -1), numbers).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 511, 512, 70_000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e4])
def test_random_sample_matches_full_cumulative_distribution(vocab_size: int, scale: float) -> None:
    torch.manual_seed(vocab_size)
    probabilities = (torch.randn(9, vocab_size) * scale).softmax(-1)
    uniform = torch.cat([torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64), torch.rand(7, dtype=torch.float64)])
    cumulative = integer_weights(probabilities).cumsum(-1)
    target = (uniform * cumulative[:, -1].double()).long()
    expected = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    assert random_sample(probabilities, uniform).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000, 20_011])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_zero_probability_is_never_sampled(vocab_size: int, scale: float) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size) * scale
    logits[:, 1::2] = float("-inf")
    logits[:, -1] = float("-inf") if vocab_size > 1 else 0.0
    probabilities = logits.softmax(-1)
    for number in (0.0, 2.0**-53, 0.5, 1 - 2.0**-52, ALMOST_ONE):
        uniform = torch.full((4,), number, dtype=torch.float64)
        tokens = [random_sample(probabilities, uniform)]
        for top_k, top_p in [(0, 0.999999999), (3, 1.0), (vocab_size, 0.5), (70, 0.99), (0, 1e-12), (0, 1.0)]:
            tokens.append(top_k_top_p_sample(logits, probabilities, [top_k] * 4, [top_p] * 4, [number] * 4))
        for sampled in tokens:
            assert (probabilities.gather(-1, sampled[:, None]) > 0).all()


def test_chi_square_with_random_numbers() -> None:
    torch.manual_seed(3)
    row = torch.randn(100)
    points = 20_000
    uniform = torch.rand(points, dtype=torch.float64)
    expected = row.double().softmax(-1) * points
    hits = torch.bincount(random_sample(row.softmax(-1).expand(points, -1), uniform), minlength=100)
    # 99 degrees of freedom: mean 99, standard deviation 14.
    assert float(((hits - expected) ** 2 / expected).sum()) < 99 + 5 * 14


@random_seeds(5)
def test_sampling_is_batch_invariant(seed: int) -> None:
    """Equal bit for bit alone, among rows of every kind, and in another order."""
    torch.manual_seed(seed)
    rows, vocab_size = 24, 1501
    logits = torch.randn(rows, vocab_size) * torch.logspace(-2, 2, rows)[:, None]
    logits[3] = 0.0
    logits[7] = torch.randint(2, (vocab_size,)).float()
    logits[11, 1:] = float("-inf")
    top_k = torch.tensor([0, 1, 5, 60, 64, 600, 1500, 5000]).repeat(3)
    top_p = torch.tensor([1.0, 0.5, 0.9, 0.999, 0.01, 0.7], dtype=torch.float64).repeat(4)
    uniform = torch.rand(rows, dtype=torch.float64)

    def sampled(order: torch.Tensor) -> list[int]:
        part = logits[order]
        settings = (each[order].tolist() for each in (top_k, top_p, uniform))
        return top_k_top_p_sample(part, part.softmax(-1), *settings).tolist()

    together = sampled(torch.arange(rows))
    assert [sampled(torch.tensor([row]))[0] for row in range(rows)] == together
    order = torch.randperm(rows)
    assert sampled(order) == [together[row] for row in order.tolist()]
    plain = random_sample(logits.softmax(-1), uniform).tolist()
    assert [
        random_sample(logits[row : row + 1].softmax(-1), uniform[row : row + 1]).item() for row in range(rows)
    ] == plain


def test_integer_weights_are_exact() -> None:
    probabilities = torch.rand(1000)
    weights = integer_weights(probabilities)
    assert [w / UNIT_WEIGHT for w in weights.tolist()] == probabilities.tolist()
    assert integer_weights(torch.tensor([0.0, 1.0, 2.0**-60, 2.0**-61])).tolist() == [0, UNIT_WEIGHT, 1, 0]
