from __future__ import annotations

import random

import pytest
import torch

from logitship.server.model.kv_cache import CacheShape, SlotCache
from logitship.server.model.step_layout import DecodeBatch, Segment, StepLayout, cheapest_batches

CPU = torch.device("cpu")


def ways(*segments: tuple[int, int]) -> list[list[int]]:
    """The slots of each call, for sequences with so many positions, of which so many are to be computed."""
    placed = [(0, Segment(slot, end - length, length)) for slot, (end, length) in enumerate(segments)]
    return [[segment.slot for _, segment in batch] for batch, _ in cheapest_batches(placed)]


def test_sequences_of_like_lengths_attend_at_once() -> None:
    assert ways((100, 1), (120, 1), (90, 1), (110, 1)) == [[0, 1, 2, 3]]
    assert ways((8000, 1), (8000, 1)) == [[0, 1]]
    assert ways((100, 3), (120, 4), (90, 2)) == [[0, 1, 2]]


def test_one_long_sequence_among_short_ones_is_not_what_all_are_padded_to() -> None:
    assert ways((8000, 1), (10, 1), (10, 1), (10, 1)) == []


def test_a_few_with_drafts_among_many_without_get_a_call_of_their_own() -> None:
    others = [(300, 1)] * 30
    assert ways((300, 9), (300, 5), *others) == [[*range(2, 32)], [0, 1]]
    assert ways(*[(300, 5)] * 30, (300, 1)) == [[*range(31)]]


def test_nobody_decodes() -> None:
    assert ways() == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("num_calls")
def test_every_tokens_output_is_found(seed: int) -> None:
    """Each call gives its tokens in its own order; `order` puts all of them back."""
    rng = random.Random(seed)
    slots = rng.sample(range(12), rng.randint(1, 8))
    segments = [Segment(slot, rng.randint(0, 40), rng.choice([1, 1, 2, 5])) for slot in slots]
    cut = rng.randint(0, len(segments))
    cache = SlotCache(CacheShape(1, 12, 1, 64, 1), torch.float32, CPU)
    layout = StepLayout(segments[:cut], segments[cut:], cache, torch.float32, CPU)
    outputs = [batch.tokens[batch.rows, batch.places] for batch in layout.batches]
    outputs += [torch.arange(first, first + segment.length) for first, segment in layout.one_by_one]
    tokens = torch.cat(outputs)
    if layout.order is not None:
        tokens = tokens[layout.order]
    assert tokens.tolist() == [*range(sum(segment.length for segment in segments))]


def test_a_mask_shows_each_token_what_stands_before_it() -> None:
    placed = [(0, Segment(2, 3, 2)), (2, Segment(0, 1, 1))]
    batch = DecodeBatch(placed, False, torch.float32, CPU)
    seen = batch.mask(None, 2) == 0
    assert seen.shape == (3, 1, 4, 5)
    # Two heads after one another, of each the two tokens; slot 1 has none, and sees one position.
    assert seen[:, 0].sum(-1).tolist() == [[2, 2, 2, 2], [1, 1, 1, 1], [4, 5, 4, 5]]
    assert (batch.mask(2, 1)[2, 0, 1] == 0).tolist() == [False, False, False, True, True]
    part = DecodeBatch(placed, True, torch.float32, CPU)
    assert (part.mask(None, 1) == 0)[:, 0].sum(-1).tolist() == [[4, 5], [2, 2]]
