from __future__ import annotations

import random

import pytest
import torch

from logitship.server.model import attention
from logitship.server.model.attention import DecodeBatch, Segment, StepLayout, cheapest_batches
from logitship.server.model.kv_cache import CacheShape, SlotCache
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")


def calls(*segments: tuple[int, int]) -> list[list[int]]:
    """Return the slots of each call, for sequences given as (positions, positions to compute)."""
    placed = [(0, Segment(slot, end - length, length)) for slot, (end, length) in enumerate(segments)]
    return [[segment.slot for _, segment in batch] for batch, _ in cheapest_batches(placed)]


def test_similar_lengths_attend_in_one_call() -> None:
    assert calls((100, 1), (120, 1), (90, 1), (110, 1)) == [[0, 1, 2, 3]]
    assert calls((8000, 1), (8000, 1)) == [[0, 1]]
    assert calls((100, 3), (120, 4), (90, 2)) == [[0, 1, 2]]


def test_short_sequences_are_not_padded_to_a_long_one() -> None:
    assert calls((8000, 1), (10, 1), (10, 1), (10, 1)) == []


def test_few_sequences_with_drafts_get_a_separate_call() -> None:
    others = [(300, 1)] * 30
    assert calls((300, 9), (300, 5), *others) == [[*range(2, 32)], [0, 1]]
    assert calls(*[(300, 5)] * 30, (300, 1)) == [[*range(31)]]


def test_no_decoding_sequences() -> None:
    assert calls() == []


def test_order_that_is_its_own_inverse() -> None:
    """Two single tokens attend before a sequence with a draft token, which is first in the packed row."""
    placed = [(2, Segment(0, 5, 1)), (3, Segment(1, 5, 1)), (0, Segment(2, 5, 2))]
    order = attention._order(placed, CPU)
    assert order is not None
    assert order.tolist() == [2, 3, 0, 1]


@pytest.mark.usefixtures("num_calls")
@random_seeds(200, shares_fixtures=True)
def test_order_restores_the_packed_row(seed: int) -> None:
    """Each call returns its tokens in its own order; `order` restores that of the packed row."""
    rng = random.Random(seed)
    slots = rng.sample(range(12), rng.randint(1, 8))
    segments = [Segment(slot, rng.randint(0, 40), rng.choice([1, 1, 2, 5])) for slot in slots]
    cut = rng.randint(0, len(segments))
    cache = SlotCache(CacheShape(1, 12, 1, 64, 1), torch.float32, CPU)
    layout = StepLayout(segments[:cut], segments[cut:], cache, torch.float32, CPU)
    outputs = [batch.tokens[batch.rows, batch.columns] for batch in layout.batches]
    outputs += [torch.arange(first, first + segment.length) for first, segment in layout.unbatched]
    tokens = torch.cat(outputs)
    if layout.order is not None:
        tokens = tokens[layout.order]
    assert tokens.tolist() == [*range(sum(segment.length for segment in segments))]


def test_prompts_of_one_token_attend_with_the_decoding_sequences() -> None:
    cache = SlotCache(CacheShape(1, 12, 1, 64, 1), torch.float32, CPU)
    decode, prefill = [Segment(0, 9, 1), Segment(1, 7, 1)], [Segment(2, 0, 1), Segment(3, 5, 1), Segment(4, 0, 3)]
    layout = StepLayout(decode, prefill, cache, torch.float32, CPU)
    assert [batch.tokens[:, 0].tolist() for batch in layout.batches] == [[0, 1, 2, 3]]
    assert layout.unbatched == [(4, prefill[2])]


def test_mask_shows_each_token_the_positions_before() -> None:
    placed = [(0, Segment(2, 3, 2)), (2, Segment(0, 1, 1))]
    batch = DecodeBatch(placed, False, torch.float32, CPU)
    visible = batch.mask(None, 2) == 0
    assert visible.shape == (3, 1, 4, 5)
    # Two heads, each with the two tokens; slot 1 has no sequence, and attends to one position.
    assert visible[:, 0].sum(-1).tolist() == [[2, 2, 2, 2], [1, 1, 1, 1], [4, 5, 4, 5]]
    assert (batch.mask(2, 1)[2, 0, 1] == 0).tolist() == [False, False, False, True, True]
    subset = DecodeBatch(placed, True, torch.float32, CPU)
    assert (subset.mask(None, 1) == 0)[:, 0].sum(-1).tolist() == [[4, 5], [2, 2]]
