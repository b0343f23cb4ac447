"""Detectors against those of transformers, their rate of false positives, and marks that are found."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkDetector,
    WatermarkingConfig,
)

from logitship.builtin_processors import Registry, WatermarkKey, detect_watermark
from tests.helpers.watermarks import WATERMARK_KEY, installed_processors

MakeRow = Callable[..., dict[str, Any]]
VOCAB = 400
LEFTHASH = {"seeding_scheme": "lefthash"}
MARKS: list[tuple[str, dict[str, Any]]] = [
    ("watermark_kgw", {}),
    ("watermark_kgw", {"context_width": 3, "greenlist_ratio": 0.5}),
    ("watermark_kgw", LEFTHASH),
    ("watermark_synthid", {}),
    ("watermark_synthid", {"ngram_len": 3, "depth": 5}),
]


def random_text(generator: random.Random, length: int, vocab_size: int = VOCAB) -> list[int]:
    """Return tokens with the frequencies of words, which repeat."""
    return generator.choices(range(vocab_size), weights=[1 / (rank + 2) for rank in range(vocab_size)], k=length)


def test_green_tokens_are_those_of_transformers() -> None:
    model: Any = SimpleNamespace(vocab_size=VOCAB, bos_token_id=-1, is_encoder_decoder=False)
    config = WatermarkingConfig(greenlist_ratio=0.25, hashing_key=WATERMARK_KEY.hashing_key)
    detector = WatermarkDetector(model, "cpu", config, ignore_repeated_ngrams=True)
    generator = random.Random(0)
    for length in (3, 80, 200):
        tokens = random_text(generator, length)
        expected: Any = detector(torch.tensor([tokens]), return_dict=True)
        found = detect_watermark(tokens, WATERMARK_KEY, params=LEFTHASH, vocab_size=VOCAB)
        assert found.num_scored == expected.num_tokens_scored[0]
        assert found.score == pytest.approx(expected.green_fraction[0])
        assert found.z_score == pytest.approx(expected.z_score[0])
        assert found.p_value == pytest.approx(expected.p_value[0], rel=1e-5)


@pytest.mark.parametrize("params", [{}, {"ngram_len": 3, "depth": 9}])
def test_mean_of_g_values_is_that_of_transformers(params: dict[str, Any]) -> None:
    """With transformers' mask of repeated contexts, and the weights of SynthID's weighted mean."""
    depth, length = params.get("depth", 30), params.get("ngram_len", 5)
    config: Any = SynthIDTextWatermarkingConfig(
        ngram_len=length,
        keys=WATERMARK_KEY.synthid_keys(depth),
        sampling_table_seed=WATERMARK_KEY.sampling_table_seed,
    )  # type: ignore[no-untyped-call]
    peer: SynthIDTextWatermarkLogitsProcessor = config.construct_processor(VOCAB, "cpu")
    tokens = random_text(random.Random(1), 60) + [5, 6, 7, 8, 9, 10] * 4
    g_values = peer.compute_g_values(torch.tensor([tokens]))[0].double()
    mask = peer.compute_context_repetition_mask(torch.tensor([tokens]))[0]
    weights = torch.linspace(10, 1, depth, dtype=torch.float64)
    expected = (g_values[mask] @ weights / weights.sum()).mean()
    found = detect_watermark(tokens, WATERMARK_KEY, "watermark_synthid", params, vocab_size=VOCAB)
    assert found.num_scored == mask.sum() < len(tokens) - length + 1
    assert found.score == pytest.approx(float(expected))


@pytest.mark.parametrize(("processor", "params"), MARKS)
def test_false_positives_have_the_nominal_rate(processor: str, params: dict[str, Any]) -> None:
    """2,000 texts without the mark: their p-values are uniform, as far as a normal approximation goes."""
    generator = random.Random(processor)
    vocab_size = 60 if params == LEFTHASH else 50_000  # of a permutation, only few are needed
    number = 2000
    p_values = np.empty(number)
    for index in range(number):
        key = WATERMARK_KEY if params == LEFTHASH else WatermarkKey(generator.randbytes(16))
        tokens = random_text(generator, 200, min(vocab_size, 3000))
        p_values[index] = detect_watermark(tokens, key, processor, params, vocab_size=vocab_size).p_value
    for level in (0.5, 0.1, 0.01):
        deviation = math.sqrt(level * (1 - level) / number)
        assert abs((p_values < level).mean() - level) < 4 * deviation + 0.004 * (params == LEFTHASH), level
    assert p_values.min() > 1e-6


def marked_text(
    registry: Registry, processor: str, params: dict[str, Any], make_row: MakeRow, length: int, seed: int
) -> list[int]:
    """Sample a text from random logits with the entropy of a model at temperature 1."""
    instance: Any = registry.make(processor)
    output: list[int] = []
    row = make_row(params, [1], output, vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        logits = torch.randn(1, VOCAB, generator=generator) * 3
        instance(logits, [row])
        output.append(int(logits.softmax(1).multinomial(1, generator=generator)))
    return output


@pytest.mark.parametrize(("processor", "params"), MARKS)
def test_marks_are_found_with_their_key_only(processor: str, params: dict[str, Any], make_row: MakeRow) -> None:
    registry = installed_processors()
    for seed in range(3):
        tokens = marked_text(registry, processor, params, make_row, 200, seed)
        found = detect_watermark(tokens, WATERMARK_KEY, processor, params, vocab_size=VOCAB)
        assert found.p_value < 1e-6, found
        for key in (WatermarkKey(b"another secret of the tests"), WatermarkKey(WATERMARK_KEY.secret + b"2")):
            assert detect_watermark(tokens, key, processor, params, vocab_size=VOCAB).p_value > 1e-4
        # A passage among other text: less evidence, and still some.
        mixed = random_text(random.Random(seed), 100) + tokens
        assert detect_watermark(mixed, WATERMARK_KEY, processor, params, vocab_size=VOCAB).p_value < 1e-3


@pytest.mark.parametrize(("processor", "params"), MARKS)
def test_repeated_text_is_no_further_evidence(processor: str, params: dict[str, Any]) -> None:
    tokens = random_text(random.Random(2), 30)
    one = detect_watermark(tokens * 2, WATERMARK_KEY, processor, params, vocab_size=VOCAB)
    many = detect_watermark(tokens * 20, WATERMARK_KEY, processor, params, vocab_size=VOCAB)
    assert (one.num_scored, one.score, one.p_value) == (many.num_scored, many.score, many.p_value)


@pytest.mark.parametrize(("processor", "params"), MARKS)
def test_short_text_is_no_evidence(processor: str, params: dict[str, Any]) -> None:
    for tokens in ([], [3]):
        found = detect_watermark(tokens, WATERMARK_KEY, processor, params, vocab_size=VOCAB)
        assert (found.num_tokens, found.num_scored, found.z_score, found.p_value) == (len(tokens), 0, 0.0, 1.0)
        assert math.isnan(found.score)


@pytest.mark.parametrize(
    ("tokens", "processor", "params", "message"),
    [
        ([1, VOCAB], "watermark_kgw", {}, f"token id {VOCAB} is outside the vocabulary"),
        ([-1], "watermark_synthid", {}, "token id -1 is outside the vocabulary"),
        ([1], "watermark", {}, "no watermark is named 'watermark'; there are watermark_kgw, watermark_synthid"),
        ([1], "watermark_kgw", {"greenlist_ratio": 2.0}, "greenlist_ratio: expected a number above 0"),
    ],
)
def test_invalid_arguments(tokens: list[int], processor: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        detect_watermark(tokens, WATERMARK_KEY, processor, params, vocab_size=VOCAB)
