"""Green lists: those of transformers, logitship's own by their definition, and their effect on rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WatermarkingConfig

from logitship.builtin_processors import WatermarkKey, WatermarkKgwLogitsProcessor
from logitship.builtin_processors.watermarks import green_lists
from logitship.builtin_processors.watermarks.green_lists import KeyedGreenLists, PermutedGreenLists
from logitship.sampler.processors.request_view import ModelView
from tests.helpers.watermarks import WATERMARK_KEY

MakeRow = Callable[..., dict[str, Any]]
VOCAB = 173
MODEL = ModelView(VOCAB, frozenset(), None)


def edited(processor: WatermarkKgwLogitsProcessor, logits: torch.Tensor, rows: list[dict[str, Any]]) -> torch.Tensor:
    found = processor(logits.clone(), rows)
    assert found.shape == logits.shape
    return found


@pytest.mark.parametrize(("ratio", "bias"), [(0.25, 2.0), (0.5, 3.5), (0.004, 1.0)])
def test_lefthash_is_that_of_transformers(ratio: float, bias: float, make_row: MakeRow) -> None:
    """The same edited logits, for each last token, of the prompt or the output."""
    config = WatermarkingConfig(greenlist_ratio=ratio, bias=bias, hashing_key=WATERMARK_KEY.hashing_key)
    original = config.construct_processor(VOCAB, "cpu")  # type: ignore[no-untyped-call]
    processor = WatermarkKgwLogitsProcessor(WATERMARK_KEY)
    params = {"greenlist_ratio": ratio, "bias": bias, "seeding_scheme": "lefthash"}
    logits = torch.randn(VOCAB, VOCAB)
    logits[3, 20:90] = -torch.inf
    histories = [([5, token], []) if token % 2 else ([5], [7, token]) for token in range(VOCAB)]
    rows = [make_row(params, prompt, output, vocab_size=VOCAB) for prompt, output in histories]
    inputs = torch.tensor([(prompt + output)[-2:] for prompt, output in histories])
    for _ in range(2):  # the second time, the lists are kept
        assert torch.equal(edited(processor, logits, rows), original(inputs, logits))


def keyed_green(secret: bytes, context: list[int], token: int, ratio: float) -> bool:
    """Return whether a token is green, by the definition, one token at a time."""
    key = hashlib.sha512(secret).digest()

    def derived(purpose: bytes, data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, key=key, person=purpose).digest(), "little")

    table_seed = derived(b"kgw-table", b"") % 2**128
    number = int(np.random.PCG64(table_seed).random_raw(token + 1)[-1]) >> 32
    data = b"".join(each.to_bytes(8, "little") for each in context)
    of_context = derived(b"kgw-context", data) % 2**64 | 1
    a, b = of_context % 2**32, of_context >> 32
    hashed = (a * number + b) % 2**32
    signed = hashed - 2**32 if hashed >= 2**31 else hashed
    return signed + 2**31 < ratio * 2**32


@pytest.mark.parametrize("width", [1, 2, 4])
def test_keyed_lists_follow_their_definition(width: int, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green_lists, "_MAX_ELEMENTS", 2 * VOCAB)  # two rows at a time
    processor = WatermarkKgwLogitsProcessor(WATERMARK_KEY)
    generator = random.Random(width)
    rows, expected = [], []
    logits = torch.randn(5, VOCAB)
    for row in range(5):
        ratio, bias = generator.choice([0.1, 0.25, 0.5]), generator.choice([0.0, 1.0, 4.0])
        history = generator.choices(range(VOCAB), k=6)
        params = {"greenlist_ratio": ratio, "bias": bias, "context_width": width}
        rows.append(make_row(params, history[:row], history[row:], vocab_size=VOCAB))
        green = [keyed_green(WATERMARK_KEY.secret, history[-width:], token, ratio) for token in range(VOCAB)]
        expected.append(logits[row] + torch.tensor(green).float() * bias)
    assert torch.equal(edited(processor, logits, rows), torch.stack(expected))


def test_schemes_and_unmarked_rows_in_one_step(make_row: MakeRow) -> None:
    """Each row equals itself alone. One has no context, and stays as it is."""
    processor = WatermarkKgwLogitsProcessor(WATERMARK_KEY)
    rows = [
        make_row({"seeding_scheme": "lefthash"}, [1], [2], vocab_size=VOCAB),
        make_row({"context_width": 3}, [1], [2], vocab_size=VOCAB),
        make_row({"context_width": 2}, [1], [2], vocab_size=VOCAB),
        make_row({"seeding_scheme": "lefthash", "greenlist_ratio": 0.5}, [1], [2, 3], vocab_size=VOCAB),
        make_row({}, [1], [], vocab_size=VOCAB),
    ]
    logits = torch.randn(len(rows), VOCAB)
    together = edited(processor, logits, rows)
    assert torch.equal(together[1], logits[1])
    for row, params in enumerate(rows):
        assert torch.equal(edited(processor, logits[row : row + 1], [params])[0], together[row])
        assert (together[row] != logits[row]).any() == (row != 1)


def test_part_of_green_tokens() -> None:
    """The part is the ratio, and is the same for tokens and for contexts."""
    lists = KeyedGreenLists(WATERMARK_KEY)
    contexts = [[context] for context in range(400)]
    green = np.stack([lists.are_green(contexts, [token] * 400, 0.3) for token in range(400)])
    deviation = (0.3 * 0.7 / 400) ** 0.5
    for axis in (0, 1):
        parts = green.mean(axis=axis)
        assert abs(parts.mean() - 0.3) < 5 * deviation / 20
        assert 0.8 < parts.std() / deviation < 1.2
        assert np.abs(parts - 0.3).max() < 5 * deviation
    other = KeyedGreenLists(WatermarkKey(b"another secret of the tests"))
    same = np.mean([other.are_green(contexts, [token] * 400, 0.3) == green[token] for token in range(400)])
    assert abs(same - (0.3 * 0.3 + 0.7 * 0.7)) < 0.01


def test_lists_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(green_lists, "_MAX_MASK_BYTES", 3 * VOCAB // 8 + 3)
    lists = PermutedGreenLists(WATERMARK_KEY, VOCAB)
    fresh = PermutedGreenLists(WATERMARK_KEY, VOCAB)
    for token in (1, 2, 3, 1, 4, 1, 2):
        found = lists.are_green([[token]] * VOCAB, range(VOCAB), 0.25)
        assert np.array_equal(found, fresh.are_green([[token]] * VOCAB, range(VOCAB), 0.25))
        assert len(lists._kept) <= 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"greenlist_ratio": 1.0}, "greenlist_ratio: expected a number above 0 and below 1, got 1.0"),
        ({"greenlist_ratio": 0.0}, "greenlist_ratio: expected a number above 0 and below 1"),
        ({"bias": -1.0}, "bias: expected a number from 0 to 100"),
        ({"context_width": 0}, "context_width: expected an integer from 1 to 16"),
        ({"seeding_scheme": "selfhash"}, 'seeding_scheme: expected "keyed" or "lefthash"'),
        (
            {"seeding_scheme": "lefthash", "context_width": 2},
            "context_width: the green lists of lefthash depend on one",
        ),
    ],
)
def test_invalid_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        WatermarkKgwLogitsProcessor(WATERMARK_KEY).prepare(params, MODEL)


def test_without_a_key() -> None:
    with pytest.raises(ValueError, match="no watermark key: its operator sets one with --watermark-key-file"):
        WatermarkKgwLogitsProcessor().prepare({}, MODEL)
