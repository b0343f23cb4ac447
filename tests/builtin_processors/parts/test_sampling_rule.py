"""Common properties of all processors that change how tokens are sampled at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from logitship.builtin_processors.parts.sampling_rule import RandomRowsProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS
from logitship.sampler.sampling_params import SamplingParams
from tests.builtin_processors.sampling_rows import MakeRow, random_logits
from tests.helpers.random_cases import random_seeds

RULES = [each for each in BUILTIN_PROCESSORS if issubclass(each, RandomRowsProcessor)]


def test_rules() -> None:
    assert len(RULES) == 10


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_stay_as_they_are(rule: Any, make_row: MakeRow) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    greedy = [SamplingParams(temperature=0), SamplingParams(top_k=1)]
    random_rows = [SamplingParams(seed=1), SamplingParams(temperature=0.5, seed=2)]
    of_rows = [greedy[0], random_rows[0], greedy[1], random_rows[1]]
    params = {**rule.example, "xtc_probability": 1.0}
    rows = [make_row(params, [1], [], sampling_params=each) for each in of_rows]
    edited = rule()(logits.clone(), rows)
    assert torch.equal(edited[::2], logits[::2])
    assert not torch.equal(edited[1::2], logits[1::2])
    only_greedy = rule()(logits[::2].clone(), rows[::2])
    assert torch.equal(only_greedy, logits[::2])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [700, 49_152])
@random_seeds(15, shares_fixtures=True)
def test_batch_equals_alone(seed: int, rule: Any, vocab_size: int, make_row: MakeRow) -> None:
    """Rows of any parameters; in the batch, they are processed in parts."""
    generator = random.Random(seed)
    logits = torch.cat([random_logits(generator, vocab_size) for _ in range(9)])
    of_rows = [
        SamplingParams(temperature=generator.choice([0.0, 0.5, 1.0, 2.0]), seed=generator.randrange(100))
        for _ in range(9)
    ]
    outputs = [[0] * generator.randrange(5) for _ in range(9)]

    def rows() -> list[dict[str, Any]]:
        return [
            make_row(dict(rule.example), [1], output, vocab_size=vocab_size, sampling_params=each)
            for each, output in zip(of_rows, outputs, strict=True)
        ]

    edited, processor = rule()(logits.clone(), rows()), rule()
    for place, row in enumerate(rows()):
        assert torch.equal(processor(logits[place : place + 1].clone(), [row])[0], edited[place])
    some = [7, 2, 4]
    assert torch.equal(processor(logits[some].clone(), [rows()[place] for place in some]), edited[some])


@pytest.mark.parametrize("rule", RULES)
def test_only_finite_token_stays(rule: Any, make_row: MakeRow) -> None:
    """So a token that masks force is certain before the logits exist."""
    for value in (0.0, -1e4, 3.5):
        logits = torch.full((2, 300), -torch.inf)
        logits[:, 17] = value
        rows = [make_row(dict(rule.example), [1], [0] * place) for place in range(2)]
        assert torch.equal(rule()(logits.clone(), rows), logits)


@pytest.mark.parametrize("rule", RULES)
def test_row_without_tokens_harms_no_other(rule: Any, make_row: MakeRow) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[1] = -torch.inf
    params = {**rule.example, "xtc_probability": 1.0}

    def rows(places: list[int]) -> list[dict[str, Any]]:
        return [make_row(params, [1], [], sampling_params=SamplingParams(seed=place)) for place in places]

    edited = rule()(logits.clone(), rows([0, 1, 2]))
    assert not (edited[1] > -torch.inf).any()
    assert torch.equal(edited[::2], rule()(logits[::2].clone(), rows([0, 2])))
