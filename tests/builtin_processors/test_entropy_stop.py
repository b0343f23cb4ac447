from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from logitship.builtin_processors import EntropyStopLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.tokenizer import Tokenizer
from tests.builtin_processors.sampling_rows import MakeRow, probabilities, random_logits, values
from tests.helpers.random_cases import random_seeds

MODEL = ModelView(100, frozenset({2}), None)


@random_seeds(200, shares_fixtures=True)
def test_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    size, window, threshold = generator.choice([10, 300]), generator.choice([1, 2, 5]), generator.uniform(0.2, 2.5)
    end = [generator.randrange(size) for _ in range(generator.choice([1, 2, 3]))]
    params = {"entropy_threshold": threshold, "entropy_window": window, "entropy_end": end}
    row = make_row(params, [1], [], vocab_size=size)
    processor = EntropyStopLogitsProcessor()
    mean, written = 0.0, 0
    for step in range(25):
        logits = random_logits(generator, size)
        edited = processor(logits.clone(), [row])
        entropy = -math.fsum(p * math.log(p) for p in probabilities(values(logits)) if p > 0)
        mean = entropy if step == 0 else mean + 2 / (window + 1) * (entropy - mean)
        begins = step + 1 > window and mean <= threshold
        if written == 0 and abs(mean - threshold) < 1e-4 * (1 + mean):
            return  # float32 may decide otherwise
        wants = begins if written == 0 else written < len(end)
        if wants and logits[0, end[written]] > -math.inf:
            expected = torch.full_like(logits, -math.inf)
            expected[0, end[written]] = logits[0, end[written]]
            written += 1
        else:
            expected = logits
        assert torch.equal(edited, expected)
        row["__req__"].output_ids.append(generator.randrange(size))


def test_default_end_is_the_eos_token(make_row: MakeRow) -> None:
    row = make_row({"entropy_threshold": 9.0, "entropy_window": 1}, [1], [], vocab_size=6, eos_token_ids={2})
    processor = EntropyStopLogitsProcessor()
    assert torch.equal(processor(torch.zeros(1, 6), [row]), torch.zeros(1, 6))
    row["__req__"].output_ids.append(0)
    assert processor(torch.zeros(1, 6), [row]).isfinite().nonzero().tolist() == [[0, 2]]


def test_text_is_tokenized(tokenizer: Tokenizer) -> None:
    model = ModelView(260, frozenset({1}), tokenizer.hf_tokenizer)
    prepared = EntropyStopLogitsProcessor().prepare({"entropy_threshold": 1, "entropy_end": "ab"}, model)
    assert prepared.phrase == tuple(tokenizer.encode("ab", add_special_tokens=False))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "entropy_threshold: missing from custom_params, expected a number, 0 or greater"),
        ({"entropy_threshold": -1}, "entropy_threshold: expected a number, 0 or greater, got -1"),
        (
            {"entropy_threshold": 1, "entropy_window": 0},
            "entropy_window: expected an integer from 1 to 1000000, got 0",
        ),
        ({"entropy_threshold": 1, "entropy_end": []}, "entropy_end: expected at least one token id"),
        ({"entropy_threshold": 1, "entropy_end": 5}, "entropy_end: expected a string or a list of token ids, got 5"),
        ({"entropy_threshold": 1, "entropy_end": [100]}, r"entropy_end: token id 100 is outside.*\(0 to 99\)"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EntropyStopLogitsProcessor().prepare(params, MODEL)


def test_model_without_eos_token_needs_an_end() -> None:
    with pytest.raises(ValueError, match=r"^entropy_end: the model has no EOS token$"):
        EntropyStopLogitsProcessor().prepare({"entropy_threshold": 1}, ModelView(9, frozenset(), None))
