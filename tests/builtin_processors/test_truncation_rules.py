from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from logitship.builtin_processors import PLessLogitsProcessor, TopNSigmaLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
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


def top_n_sigma(logits: list[float], n: float) -> set[int]:
    finite = [each for each in logits if each > -math.inf]
    mean = math.fsum(finite) / len(finite)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in finite) / len(finite))
    return {token for token, each in enumerate(logits) if -math.inf < each >= max(finite) - n * deviation}


def p_less(logits: list[float], temperature: float, is_normalized: bool, slack: float) -> set[int]:
    of_tokens = probabilities(logits, temperature)
    limit = math.fsum(each**2 for each in of_tokens)
    if is_normalized and len(logits) > 1:
        limit = (len(logits) * limit - 1) / (len(logits) - 1)
    limit = min(limit, max(of_tokens))
    return {
        t for t, each in enumerate(of_tokens) if logits[t] > -math.inf and each >= limit * (1 + slack) - 1e-9 * slack
    }


@random_seeds(1000, shares_fixtures=True)
def test_top_n_sigma_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    n, temperature = generator.choice([0.3, 1.0, 2.5]), generator.choice([0.5, 1.0, 3.0])
    edited = call("top_n_sigma", make_row, logits, {"top_n_sigma": n}, temperature=temperature)
    slack = 1e-5 + 1e-6 * abs(logits.max().item()) / max(1e-3, logits[logits.isfinite()].std(correction=0).item())
    assert top_n_sigma(values(logits), n - slack) <= kept(edited) | {int(logits.argmax())}
    assert kept(edited) <= top_n_sigma(values(logits), n + slack)
    assert torch.equal(edited[edited.isfinite()], logits[edited.isfinite()])
    assert int(logits.argmax()) in kept(edited)


@random_seeds(1000, shares_fixtures=True)
def test_p_less_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    temperature, is_normalized = generator.choice([0.5, 1.0, 3.0]), generator.random() < 0.5
    params = {"p_less_norm": is_normalized, "after_temperature": generator.random() < 0.7}
    edited = call("p_less", make_row, logits, params, temperature=temperature)
    used = temperature if params["after_temperature"] else 1.0
    assert p_less(values(logits), used, is_normalized, 1e-4) <= kept(edited)
    assert kept(edited) <= p_less(values(logits), used, is_normalized, -1e-4)
    assert int(logits.argmax()) in kept(edited)
    assert torch.equal(edited[edited.isfinite()], logits[edited.isfinite()])


def test_equal_logits_all_stay(make_row: MakeRow) -> None:
    for size in (1, 7, 300, 49_152):
        logits = torch.full((2, size), 3.7)
        for name, params in (("p_less", {}), ("p_less", {"p_less_norm": True}), ("top_n_sigma", {"top_n_sigma": 0.1})):
            assert torch.equal(call(name, make_row, logits, params), logits)


def test_top_n_sigma_off(make_row: MakeRow) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    for n in (0.0, -1.0):
        assert torch.equal(call("top_n_sigma", make_row, logits, {"top_n_sigma": n}), logits)


@pytest.mark.parametrize(
    ("processor", "params", "message"),
    [
        (TopNSigmaLogitsProcessor(), {}, "top_n_sigma: missing from custom_params, expected a number"),
        (TopNSigmaLogitsProcessor(), {"top_n_sigma": "1"}, "top_n_sigma: expected a number, got '1'"),
        (TopNSigmaLogitsProcessor(), {"top_n_sigma": math.nan}, "top_n_sigma: expected a number, got nan"),
        (PLessLogitsProcessor(), {"p_less_norm": 1}, "p_less_norm: expected true or false, got 1"),
        (PLessLogitsProcessor(), {"after_temperature": "no"}, "after_temperature: expected true or false, got 'no'"),
    ],
)
def test_refuses(processor: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        processor.prepare(params, MODEL)
