from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from logitship.builtin_processors import XTCLogitsProcessor
from logitship.builtin_processors.parts.sampling_rule import seed_of
from logitship.sampler.ops.sample_tokens import uniform_numbers
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.builtin_processors.sampling_rows import (
    MakeRow,
    call,
    kept,
    probabilities,
    random_logits,
    random_size,
    values,
)
from tests.helpers.random_cases import random_seeds

MODEL = ModelView(100, frozenset(), None)
PEAKED = torch.tensor([[3.0, 2.9, 2.8, 0.0, -1.0]])


def without_top_choices(logits: list[float], threshold: float, min_keep: int, temperature: float) -> set[int]:
    """Compute what `llama_sample_xtc_apply` of llama.cpp leaves, and all that tie with the last top choice."""
    of_tokens = probabilities(logits, temperature)
    finite = [token for token, each in enumerate(logits) if each > -math.inf]
    top = [token for token in finite if of_tokens[token] >= threshold]
    removed = {token for token in top if of_tokens[token] > min(of_tokens[other] for other in top)}
    return set(finite) - (removed if len(finite) - len(removed) >= min_keep else set())


@random_seeds(1000, shares_fixtures=True)
def test_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    threshold, min_keep = generator.choice([1e-4, 0.01, 0.1, 0.3, 0.5]), generator.choice([0, 1, 3, 10**18])
    after, temperature = generator.random() < 0.5, generator.choice([0.5, 1.0, 3.0])
    params = {
        "xtc_probability": 1.0,
        "xtc_threshold": threshold,
        "min_keep": min_keep,
        "after_temperature": after,
    }
    edited = call("xtc", make_row, logits, params, temperature=temperature)
    used = temperature if after else 1.0
    borders = (threshold * (1 - 1e-5), threshold * (1 + 1e-5))
    assert kept(edited) in [without_top_choices(values(logits), each, min_keep, used) for each in borders]
    assert torch.equal(edited[edited.isfinite()], logits[edited.isfinite()])


def test_steps_are_random_and_repeat(make_row: MakeRow) -> None:
    """The share of the steps is right, and depends on the seed and the position alone."""
    count, probability = 4000, 0.3

    def removed(seed: int | None, rid: str = "r") -> list[bool]:
        rows = [
            make_row(
                {"xtc_probability": probability},
                [1],
                [0] * length,
                sampling_params=SamplingParams(seed=seed),
                rid=rid,
            )
            for length in range(count)
        ]
        return (~XTCLogitsProcessor()(PEAKED.repeat(count, 1), rows).isfinite()).any(dim=1).tolist()

    first = removed(5)
    assert abs(sum(first) / count - probability) < 4 * math.sqrt(probability * (1 - probability) / count)
    assert removed(5) == first
    assert removed(5, "other") == first
    assert removed(6) != first
    assert removed(None) == removed(None) != removed(None, "other")


def test_random_numbers_are_not_those_of_the_tokens() -> None:
    """Otherwise, the top choices would be removed exactly where certain tokens are sampled."""
    seeds, positions = np.full(2000, 3, dtype=np.uint64), np.arange(2000)
    streams = [uniform_numbers(seeds, positions, stream) for stream in (0, 1, 2)]
    correlations = np.corrcoef(streams)
    assert np.abs(correlations - np.eye(3)).max() < 0.1


def test_without_a_seed_the_request_decides(make_row: MakeRow) -> None:
    rows = [make_row({}, [1], [], rid=rid) for rid in ("a", "b", "a")]
    seeds = [seed_of(row["__req__"]) for row in rows]
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of(make_row({}, [1], [], sampling_params=SamplingParams(seed=-1))["__req__"]) == 2**64 - 1


@pytest.mark.parametrize("params", [{"xtc_probability": 0}, {"xtc_probability": 1, "xtc_threshold": 0.51}])
def test_off(params: dict[str, Any], make_row: MakeRow) -> None:
    assert torch.equal(call("xtc", make_row, PEAKED, params), PEAKED)


def test_only_some_rows_are_edited(make_row: MakeRow) -> None:
    processor = XTCLogitsProcessor()
    outputs = [[0] * length for length in range(20)]
    together = call("xtc", make_row, PEAKED.repeat(20, 1), {"xtc_probability": 0.5}, outputs=outputs)
    assert 0 < (~together.isfinite()).any(dim=1).sum() < 20
    for row, output in enumerate(outputs):
        params = {"xtc_probability": 0.5}
        alone = call("xtc", make_row, PEAKED, params, outputs=[output], processor=processor)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "xtc_probability: missing from custom_params, expected a number from 0 to 1"),
        ({"xtc_probability": 1.5}, "xtc_probability: expected a number from 0 to 1, got 1.5"),
        ({"xtc_probability": 1, "xtc_threshold": -0.1}, "xtc_threshold: expected a number from 0 to 1, got -0.1"),
        ({"xtc_probability": 1, "min_keep": -1}, "min_keep: expected an integer, 0 or greater, got -1"),
        ({"xtc_probability": 1, "after_temperature": 1}, "after_temperature: expected true or false, got 1"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        XTCLogitsProcessor().prepare(params, MODEL)
