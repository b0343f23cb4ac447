from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from logitship.builtin_processors.registry import installed_processors
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.sampling_rows import MakeRow, call, probabilities, random_logits, random_size, values
from tests.helpers.random_cases import random_seeds

MODEL = ModelView(100, frozenset(), None)


def assert_same_distribution(edited: torch.Tensor, temperature: float, expected: list[float]) -> None:
    """Check the distribution that the engine samples from: it divides by the request's temperature."""
    found = probabilities(values(edited), temperature)
    assert all(
        math.isclose(one, other, rel_tol=2e-3, abs_tol=1e-6) for one, other in zip(found, expected, strict=True)
    ), max(zip(found, expected, strict=True), key=lambda pair: abs(pair[0] - pair[1]))


@random_seeds(1000, shares_fixtures=True)
def test_dynamic_temperature_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    """llama.cpp's `llama_sampler_temp_ext_apply`, with the finite logits as candidates."""
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    temperature, spread = generator.choice([0.3, 1.0, 2.0]), generator.choice([0.1, 0.3, 1.5])
    exponent = generator.choice([0.5, 1.0, 2.0])
    params = {"dynatemp_range": spread, "dynatemp_exponent": exponent}
    edited = call("dynamic_temperature", make_row, logits, params, temperature=temperature)
    finite = [each for each in values(logits) if each > -math.inf]
    if len(finite) == 1:
        assert torch.equal(edited, logits)
        return
    entropy = -math.fsum(p * math.log(p) for p in probabilities(finite) if p > 0)
    low, high = max(0.0, temperature - spread), temperature + spread
    dynamic = low + (high - low) * min(1.0, max(0.0, entropy / math.log(len(finite)))) ** exponent
    assert torch.equal(edited.isneginf() & logits.isfinite(), (logits - logits.max() < -1e30) & logits.isfinite()) or (
        dynamic < 1e-3
    )
    if dynamic > 0.01:
        assert_same_distribution(edited, temperature, probabilities(values(logits), dynamic))
    else:  # float32 rounds the entropy: only the most likely tokens are left
        assert edited.amax() == logits.amax()
    assert edited[logits.isneginf()].isneginf().all()
    assert not edited.isnan().any()


def test_dynamic_temperature_of_0_keeps_the_most_likely_token(make_row: MakeRow) -> None:
    logits = torch.tensor([[0.0, 300.0, -5.0, 290.0, -math.inf]])
    edited = call("dynamic_temperature", make_row, logits, {"dynatemp_range": 1.0}, temperature=0.5)
    assert probabilities(values(edited), 0.5) == [0, 1, 0, 0, 0]


@random_seeds(1000, shares_fixtures=True)
def test_quadratic_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    """text-generation-webui's `QuadraticSamplingLogitsWarper`, after the temperature."""
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    temperature = generator.choice([0.3, 1.0, 2.0])
    factor, curve = generator.choice([0.05, 0.3, 2.0]), generator.choice([1.0, 1.5, 3.0, 6.0])
    params = {"smoothing_factor": factor, "smoothing_curve": curve}
    edited = call("quadratic", make_row, logits, params, temperature=temperature)
    peak, k, s = logits.max().item(), (3 - curve) / 2, (curve - 1) / 2
    distances = [(each - peak) / temperature for each in values(logits)]
    expected = [-math.inf if d == -math.inf else -(k * factor * d**2) + s * factor * d**3 for d in distances]
    assert_same_distribution(edited, temperature, probabilities(expected))
    assert torch.equal(edited.isneginf() & logits.isfinite(), torch.zeros_like(logits, dtype=torch.bool))
    assert edited[logits.isneginf()].isneginf().all()


@pytest.mark.parametrize("name", ["dynamic_temperature", "quadratic"])
def test_extremes_stay_usable(name: str, make_row: MakeRow) -> None:
    """Neither NaN nor +inf, and the most likely token stays possible."""
    rows = [[0.0, -3e38, -1e20, -1.0, -math.inf], [1e30, -1e30, 0.0, 1e29, 5.0], [-math.inf, 4.0, *[-math.inf] * 3]]
    params = {
        "dynamic_temperature": {"dynatemp_range": 1e300},
        "quadratic": {"smoothing_factor": 100, "smoothing_curve": 10},
    }[name]
    for temperature in (1e-300, 1e-30, 1.0, 1e30, 1e300):
        edited = call(name, make_row, torch.tensor(rows), params, temperature=temperature)
        assert not edited.isnan().any()
        assert not edited.isposinf().any()
        assert (edited.amax(dim=1) > -math.inf).all()


@pytest.mark.parametrize(
    ("name", "params"),
    [("dynamic_temperature", {"dynatemp_range": 0}), ("quadratic", {"smoothing_factor": 0.0})],
)
def test_off(name: str, params: dict[str, Any], make_row: MakeRow) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(call(name, make_row, logits, params), logits)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("dynamic_temperature", {}, "dynatemp_range: missing from custom_params, expected a number, 0 or greater"),
        ("dynamic_temperature", {"dynatemp_range": -1}, "dynatemp_range: expected a number, 0 or greater, got -1"),
        (
            "dynamic_temperature",
            {"dynatemp_range": 1, "dynatemp_exponent": 0},
            "dynatemp_exponent: expected a number above 0 and at most 100, got 0",
        ),
        ("quadratic", {}, "smoothing_factor: missing"),
        ("quadratic", {"smoothing_factor": "1"}, "smoothing_factor: expected a number from 0 to 100, got '1'"),
        (
            "quadratic",
            {"smoothing_factor": 1, "smoothing_curve": 0.5},
            "smoothing_curve: expected a number from 1 to 10, got 0.5",
        ),
    ],
)
def test_refuses(name: str, params: dict[str, Any], message: str) -> None:
    processor: Any = installed_processors().make(name)
    with pytest.raises(ValueError, match=f"^{message}"):
        processor.prepare(params, MODEL)
