"""`top_k_top_p_sample` samples exactly from the distribution that sorting the vocabulary gives."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logitship.sampler.ops.sample_tokens import integer_weights, random_sample, uniform_numbers
from logitship.sampler.ops.top_k_top_p import top_k_top_p_sample
from tests.sampler.ops.conftest import KeepBySorting, SampleBySorting

ALMOST_ONE = 1 - 2.0**-53


def sample_row(logits: torch.Tensor, top_k: int, top_p: float, numbers: torch.Tensor) -> torch.Tensor:
    """Sample from one row once per number."""
    count = len(numbers)
    probabilities = logits.softmax(-1).expand(count, -1)
    expanded = logits.expand(count, -1)
    return top_k_top_p_sample(expanded, probabilities, [top_k] * count, [top_p] * count, numbers.tolist())


def adversarial_rows(vocab_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(vocab_size)
    noise = torch.randn(vocab_size)
    one_token, two_level, mostly_masked = (torch.full((vocab_size,), value) for value in (-math.inf, -3.0, -math.inf))
    one_token[vocab_size // 2] = -40.0
    two_level[::7] = 2.0
    mostly_masked[::5] = noise[::5]
    return {
        "ordinary": noise * 2,
        "peaked": noise * 10,
        "flat": noise * 1e-3,
        "all equal": torch.full((vocab_size,), -1.25),
        "two levels": two_level,
        "few levels": torch.randint(4, (vocab_size,)).float(),
        "mostly masked": mostly_masked,
        "one token": one_token,
        "huge logits": noise * 1e30,
        "large offset": noise + 1e4,
    }


ROWS = [(name, size) for size in (1, 2, 65, 700) for name in adversarial_rows(size)]
TOP_P = [1e-12, 0.1, 0.5, 0.9, 1 - 1e-7, 1.0]


@pytest.mark.parametrize(("name", "vocab_size"), ROWS)
@pytest.mark.parametrize("top_p", TOP_P)
def test_same_number_samples_same_token_as_sorting(
    name: str, vocab_size: int, top_p: float, sample_by_sorting: SampleBySorting
) -> None:
    logits = adversarial_rows(vocab_size)[name]
    weights = integer_weights(logits.softmax(-1))
    numbers = [0.0, 2.0**-53, *torch.rand(5, dtype=torch.float64).tolist(), ALMOST_ONE]
    for top_k in (0, 1, 2, 40, 64, 600, vocab_size, vocab_size + 1):
        sampled = sample_row(logits, top_k, top_p, torch.tensor(numbers, dtype=torch.float64))
        assert sampled.tolist() == [sample_by_sorting(logits, weights, top_k, top_p, number) for number in numbers]


def sampled_shares(sample_numbers: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Fraction]:
    """Return the share of [0, 1) that samples each token, by bisection between numbers that sample different tokens.

    Each token has one interval of numbers. Intervals below 2**-36 may be missed, and each border is off by at
    most that.
    """
    low, high = torch.tensor([0], dtype=torch.int64), torch.tensor([2**36 - 1], dtype=torch.int64)

    def tokens(units: torch.Tensor) -> torch.Tensor:
        return sample_numbers(units.to(torch.float64) * 2.0**-36)

    borders = {0: int(tokens(low)), 2**36: -1}
    at_low, at_high = tokens(low), tokens(high)
    while len(low) > 0:
        middle = (low + high) // 2
        at_middle = tokens(middle)
        found = (at_low != at_high) & (high - low == 1)
        borders.update(zip(high[found].tolist(), at_high[found].tolist(), strict=True))
        open_ = high - low > 1
        left, right = open_ & (at_low != at_middle), open_ & (at_middle != at_high)
        low, at_low, high, at_high = (
            torch.cat(parts)
            for parts in (
                (low[left], middle[right]),
                (at_low[left], at_middle[right]),
                (middle[left], high[right]),
                (at_middle[left], at_high[right]),
            )
        )
    starts = sorted(borders)
    shares: dict[int, Fraction] = {}
    for start, end in itertools.pairwise(starts):
        token = borders[start]
        shares[token] = shares.get(token, Fraction(0)) + Fraction(end - start, 2**36)
    return shares


@pytest.mark.parametrize(
    ("name", "vocab_size", "top_k", "top_p"),
    [
        ("ordinary", 700, 0, 0.9),
        ("ordinary", 700, 40, 0.8),
        ("ordinary", 65, 0, 1 - 1e-7),
        ("peaked", 700, 5, 1.0),
        ("flat", 700, 0, 0.3),
        pytest.param("flat", 700, 600, 0.9, marks=pytest.mark.thorough),
        ("all equal", 700, 0, 0.5),
        pytest.param("all equal", 700, 3, 1.0, marks=pytest.mark.thorough),
        ("two levels", 700, 30, 0.7),
        ("few levels", 700, 0, 0.2),
        ("mostly masked", 700, 0, 0.99),
        ("one token", 700, 7, 0.5),
        ("huge logits", 700, 50, 0.9),
        ("ordinary", 2, 0, 0.6),
        ("ordinary", 1, 1, 1e-12),
    ],
)
def test_probabilities_match_sorting(
    name: str, vocab_size: int, top_k: int, top_p: float, keep_by_sorting: KeepBySorting
) -> None:
    """Exact, not statistical: compares the shares of all numbers that sample each token."""
    logits = adversarial_rows(vocab_size)[name]
    kept = keep_by_sorting(logits, integer_weights(logits.softmax(-1)), top_k, top_p)
    total = sum(kept.values())
    shares = sampled_shares(lambda numbers: sample_row(logits, top_k, top_p, numbers))
    expected = {token: Fraction(weight, total) for token, weight in kept.items()}
    assert set(shares) <= set(expected)
    for token, share in expected.items():
        assert abs(shares.get(token, Fraction(0)) - share) <= Fraction(2, 2**36)


def test_probabilities_without_top_k_and_top_p() -> None:
    logits = adversarial_rows(700)["ordinary"]
    weights = integer_weights(logits.softmax(-1)).tolist()
    shares = sampled_shares(lambda numbers: random_sample(logits.softmax(-1).expand(len(numbers), -1), numbers))
    for token, weight in enumerate(weights):
        assert abs(shares.get(token, Fraction(0)) - Fraction(weight, sum(weights))) <= Fraction(2, 2**36)


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (20, 1.0), (50, 0.7), (0, 0.05)])
def test_kept_tokens_match_hugging_face(scale: float, top_k: int, top_p: float, keep_by_sorting: KeepBySorting) -> None:
    """An independent implementation, which checks the interpretation of the sorting reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformers import TopKLogitsWarper, TopPLogitsWarper
    torch.manual_seed(0)
    for _ in range(10):
        logits = torch.randn(400) * scale
        theirs = logits[None].double()
        if top_k > 0:
            theirs = TopKLogitsWarper(top_k)(torch.zeros(1, 1, dtype=torch.int64), theirs)
        if top_p < 1:
            theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), theirs)
        kept = keep_by_sorting(logits, integer_weights(logits.softmax(-1)), top_k, top_p)
        assert sorted(kept) == theirs[0].isfinite().nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (30, 1.0), (64, 0.8), (300, 0.9)])
def test_chi_square_of_thousands_of_samples(top_k: int, top_p: float, keep_by_sorting: KeepBySorting) -> None:
    torch.manual_seed(5)
    logits, count = torch.randn(400), 8000
    kept = keep_by_sorting(logits, integer_weights(logits.softmax(-1)), top_k, top_p)
    seeds = np.arange(count, dtype=np.uint64)
    numbers = torch.from_numpy(uniform_numbers(seeds, np.zeros(count, dtype=np.int64)))
    hits = torch.bincount(sample_row(logits, top_k, top_p, numbers), minlength=400)
    tokens = list(kept)
    expected = torch.tensor([kept[token] for token in tokens], dtype=torch.float64)
    expected *= count / expected.sum()
    assert int(hits[tokens].sum()) == count
    freedom = len(tokens) - 1
    chi_square = float(((hits[tokens] - expected) ** 2 / expected).sum())
    # Mean `freedom`, variance 2 * `freedom`; a cell with few expected hits adds to the variance, hence 6.
    assert abs(chi_square - freedom) < 6 * math.sqrt(2 * freedom)


class Orderings(TorchDispatchMode):
    """Records the sizes of the arrays that PyTorch and NumPy sort or select the largest values from."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted = 0
        self.selected_from = 0
        self._numpy = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        def note(name: str, noted: str) -> None:
            original = getattr(np, name)

            def noting(array: np.ndarray[Any, Any], *args: Any, **kwargs: Any) -> Any:
                setattr(self, noted, max(getattr(self, noted), array.shape[-1]))
                return original(array, *args, **kwargs)

            self._numpy.setattr(np, name, noting)

        for name in ("sort", "argsort", "lexsort", "unique"):
            note(name, "sorted")
        for name in ("partition", "argpartition"):
            note(name, "selected_from")
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._numpy.undo()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in ("sort", "argsort", "msort", "_unique2", "unique_dim"):
            self.sorted = max(self.sorted, args[0].shape[-1])
        if name in ("topk", "kthvalue", "median"):
            self.selected_from = max(self.selected_from, args[0].shape[-1])
        return func(*args, **(kwargs or {}))


VOCAB_SIZE = 50_000


def orderings(logits: torch.Tensor, top_k: int, top_p: float) -> Orderings:
    with Orderings() as noted:
        sample_row(logits, top_k, top_p, torch.tensor([0.7], dtype=torch.float64))
    return noted


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (50, 1.0), (50, 0.9), (0, 0.1)])
def test_concentrated_row_is_not_sorted(top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = -2.5 * (torch.randperm(VOCAB_SIZE) + 1.0).log()
    noted = orderings(logits, top_k, top_p)
    assert 0 < noted.sorted <= 512
    assert 0 < noted.selected_from < VOCAB_SIZE / 10


@pytest.mark.parametrize("scale", [0.0, 0.001, 0.1, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.5), (20_000, 0.9)])
def test_flat_row_is_sorted_only_in_small_part(scale: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    noted = orderings(torch.randn(VOCAB_SIZE) * scale, top_k, top_p)
    assert noted.sorted <= 1024


def test_orderings_are_recorded() -> None:
    with Orderings() as noted:
        torch.randn(2, 30).sort()
        torch.randn(20).argsort(descending=True)
        torch.randn(40).topk(3)
    assert (noted.sorted, noted.selected_from) == (30, 40)
    with Orderings() as noted:
        np.argsort(np.zeros((2, 50)))
        np.partition(np.zeros(60), 3)
    assert (noted.sorted, noted.selected_from) == (50, 60)
