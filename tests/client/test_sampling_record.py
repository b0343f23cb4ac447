from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from logitship.client.sampling_record import (
    ADD,
    BITS,
    KEPT,
    REMOVED,
    REPETITION,
    SCALE,
    SET,
    SamplingEdits,
    SamplingRecord,
    token_dtype,
)
from tests.helpers.random_cases import random_seeds


def random_record(rng: random.Random, vocab_size: int, length: int, start: int = 0) -> SamplingRecord:
    """Return a record whose masks have all forms."""
    forms = [rng.choice([KEPT, REMOVED, BITS]) for _ in range(length)]
    masks = [sorted(rng.sample(range(vocab_size), rng.randrange(1, vocab_size))) for _ in forms]
    bits = np.zeros((forms.count(BITS), -(-vocab_size // 8)), np.uint8)
    for row, mask in enumerate(mask for form, mask in zip(forms, masks, strict=True) if form == BITS):
        for token in mask:
            bits[row, token // 8] |= 1 << token % 8
    return SamplingRecord(
        vocab_size,
        np.array([rng.randrange(vocab_size) for _ in forms], np.int64),
        np.array([-rng.random() for _ in forms], np.float32),
        np.array(forms, np.uint8),
        np.array([0 if form == BITS else len(mask) for form, mask in zip(forms, masks, strict=True)], np.int64),
        *(
            np.array([token for of, mask in zip(forms, masks, strict=True) if of == form for token in mask], np.int64)
            for form in (KEPT, REMOVED)
        ),
        bits,
        temperature=rng.choice([1.0, 0.7]),
        start=start,
        edits=random_edits(rng, vocab_size, length),
    )


def random_edits(rng: random.Random, vocab_size: int, length: int) -> SamplingEdits:
    """Return edits of all kinds, of some tokens or of all, of `length` output tokens."""
    edits = []
    for position in range(length):
        for _ in range(rng.randrange(4)):
            kind = rng.choice([ADD, SCALE, SET, REPETITION])
            tokens = rng.sample(
                range(vocab_size), rng.randrange(1 if kind in (SET, REPETITION) else 0, vocab_size // 2)
            )
            count = len(tokens) or 1 if kind in (ADD, SET) else 1
            edits.append((position, kind, tokens, [rng.uniform(0.5, 2) for _ in range(count)]))
    return SamplingEdits(
        np.array([position for position, *_ in edits], np.int64),
        np.array([kind for _, kind, _, _ in edits], np.uint8),
        np.array([len(tokens) for _, _, tokens, _ in edits], np.int64),
        np.array([token for _, _, tokens, _ in edits for token in tokens], np.int64),
        np.array([value for *_, values in edits for value in values], np.float32),
    )


def assert_equal(one: SamplingRecord, other: SamplingRecord) -> None:
    for part, of_other in ((one, other), (one.edits, other.edits)):
        for name, value in vars(part).items():
            if name != "edits":
                np.testing.assert_array_equal(value, getattr(of_other, name), err_msg=name)


@random_seeds(10)
@pytest.mark.parametrize("vocab_size", [9, 65_535, 65_536])
def test_json_is_read_as_written(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    record = random_record(rng, vocab_size, rng.randrange(8))
    assert_equal(SamplingRecord.from_json(json.loads(json.dumps(record.to_json()))), record)


def test_ids_and_lengths_fit() -> None:
    for vocab_size in (2, 65_535, 65_536, 200_000):
        assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size  # a length may be that of the vocabulary


@random_seeds(10)
def test_parts_of_a_stream_are_joined(seed: int) -> None:
    rng = random.Random(seed)
    parts = [random_record(rng, 40, 3), random_record(rng, 40, 0, start=3), random_record(rng, 40, 2, start=3)]
    joined = SamplingRecord.join(parts)
    expected = np.concatenate([part.could_be_sampled() for part in parts])
    np.testing.assert_array_equal(joined.could_be_sampled(), expected)
    assert len(joined) == 5
    positions = [position + part.start for part in parts for position in part.edits.positions.tolist()]
    assert joined.edits.positions.tolist() == positions
    with pytest.raises(ValueError, match="do not follow each other"):
        SamplingRecord.join([parts[0], random_record(rng, 40, 1, start=4)])
    with pytest.raises(ValueError, match="no sampling records"):
        SamplingRecord.join([])


def test_masks_of_each_form() -> None:
    record = SamplingRecord(
        10,
        np.array([1, 0, 9]),
        np.zeros(3, np.float32),
        np.array([KEPT, REMOVED, BITS], np.uint8),
        np.array([2, 3, 0]),
        np.array([4, 1]),
        np.array([1, 2, 9]),
        np.array([[0b00000001, 0b10]], np.uint8),
    )
    found = [np.flatnonzero(mask).tolist() for mask in record.could_be_sampled()]
    assert found == [[1, 4], [0, 3, 4, 5, 6, 7, 8], [0, 9]]


def test_lists_of_other_servers() -> None:
    record = SamplingRecord.from_lists(10, [4, 0], [[4, 1], [0]], [[-0.5, -1.0], [0.0]], temperature=0)
    assert record.logprobs.tolist() == [-0.5, 0.0]
    assert record.temperature == 1
    assert_equal(SamplingRecord.from_lists(10, [4, 0], [[4, 1], [0]], [-0.5, 0.0]), record)
    with pytest.raises(ValueError, match="2 tokens, 1 masks and 2 log-probabilities"):
        SamplingRecord.from_lists(10, [4, 0], [[4, 1]], [-0.5, 0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, and this logitship reads version 1"),
        ({"logprobs": ""}, "do not match"),
        ({"kept": ""}, "do not match"),
        ({"edits": {"positions": "AAAAAA=="}}, "do not match"),
    ],
)
def test_record_that_cannot_be_read(change: dict[str, Any], message: str) -> None:
    record = SamplingRecord.from_lists(10, [4, 0], [[4, 1], [0]], [-0.5, 0.0])
    with pytest.raises(ValueError, match=message):
        SamplingRecord.from_json({**record.to_json(), **change})
