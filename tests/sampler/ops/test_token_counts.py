from __future__ import annotations

import random
from collections import Counter

import numpy as np

from logitship.sampler.ops.penalties import TokenCounts


def counted(counts: TokenCounts) -> dict[int, int]:
    assert len(counts.tokens) == len(counts.output_counts) == len(set(counts.tokens.tolist()))
    return dict(zip(counts.tokens.tolist(), counts.output_counts.astype(int).tolist(), strict=True))


def test_prompt_tokens_have_count_zero() -> None:
    assert counted(TokenCounts([5, 3, 5], [])) == {3: 0, 5: 0}


def test_existing_output_is_counted() -> None:
    assert counted(TokenCounts([5], [5, 7, 7])) == {5: 1, 7: 2}


def test_follows_growing_output() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(500) for _ in range(100)]
    output: list[int] = []
    counts = TokenCounts(prompt, output)
    for _ in range(100):
        output += [rng.randrange(1000) for _ in range(rng.randint(0, 12))]
        counts.follow()
        assert counted(counts) == {**dict.fromkeys(prompt, 0), **Counter(output)}


def test_reads_only_new_tokens() -> None:
    class Reads(list[int]):
        """A list that counts the items that were read."""

        read = 0

        def __getitem__(self, index: int | slice) -> list[int]:  # type: ignore[override]
            items = super().__getitem__(index)
            assert isinstance(items, list)
            self.read += len(items)
            return items

    output = Reads(range(1000))
    counts = TokenCounts([], output)
    output.read = 0
    output.append(1)
    counts.follow()
    assert output.read == 1


def test_dtypes() -> None:
    counts = TokenCounts([1], [2])
    assert counts.tokens.dtype == np.int64
    assert counts.output_counts.dtype == np.float32
