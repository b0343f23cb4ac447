from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TopHLogitsWarper, TypicalLogitsWarper

from logitship.builtin_processors.ranked_rules import RankedRule
from logitship.builtin_processors.registry import installed_processors
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
SLACK = 2e-5
"""Tolerance of a parameter: float32 may decide otherwise about a token at the border."""


def with_ties(order: list[int], count: int, scores: list[float], tolerance: float) -> set[int]:
    """Return the first tokens of an order, and those that tie with the last of them."""
    limit = scores[order[count - 1]]
    return {token for token in order if scores[token] >= limit - tolerance}


def typical(logits: list[float], share: float, min_keep: int, temperature: float) -> set[int]:
    """Meister et al., section 3."""
    of_tokens = probabilities(logits, temperature)
    entropy = -math.fsum(p * math.log(p) for p in of_tokens if p > 0)
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp((each - peak) / temperature) for each in logits))
    surprise = [log_total - (each - peak) / temperature for each in logits]
    scores = [-abs(each - entropy) for each in surprise]
    order = sorted((t for t in range(len(logits)) if logits[t] > -math.inf), key=lambda token: -scores[token])
    sums = accumulate(of_tokens[token] for token in order)
    count = next((place + 1 for place, reached in enumerate(sums) if reached >= share), len(order))
    return with_ties(order, min(max(count, min_keep, 1), len(order)), scores, 1e-4 * (1 + abs(max(scores))))


def tail_free(logits: list[float], z: float, min_keep: int, temperature: float) -> set[int]:
    """Compute what `llama_sample_tail_free` of llama.cpp computed until 2024, plus ties."""
    finite = {token for token, each in enumerate(logits) if each > -math.inf}
    if len(logits) <= 2:
        return finite
    of_tokens = probabilities(logits, temperature)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    falling = [of_tokens[token] for token in order]
    first = [one - other for one, other in pairwise(falling)]
    second = [abs(one - other) for one, other in pairwise(first)]
    total = math.fsum(second)
    shares = [each / total if total > 1e-6 else 1 / len(second) for each in second]
    stays = len(logits)
    for place, reached in enumerate(accumulate(shares)):
        if reached > z and place >= min_keep:
            stays = place
            break
    return with_ties(order, max(1, stays), logits, 0.0) & finite


def min_k(logits: list[float], tau: float) -> set[int]:
    """Ding et al., algorithm 1, of the finite logits, in exact arithmetic."""
    falling = sorted((Fraction(each) for each in logits if each > -math.inf), reverse=True)
    span = falling[0] - falling[-1] + Fraction(1e-8)
    decays = [(falling[i - 1] - falling[i]) / (i * span) for i in range(1, len(falling))]
    cliff = decays.index(max(decays)) + 1 if decays else 1
    count = min(max(cliff, int(Fraction(tau) / span)), len(falling))
    return {token for token, each in enumerate(logits) if each > -math.inf and Fraction(each) >= falling[count - 1]}


def top_h(logits: list[float], alpha: float, temperature: float) -> set[int]:
    order = sorted((t for t in range(len(logits)) if logits[t] > -math.inf), key=lambda token: -logits[token])
    of_tokens = probabilities([logits[token] for token in order[:100]], temperature)
    sums = [*accumulate(-p * math.log(p) if p > 0 else 0.0 for p in of_tokens)]
    count = max(1, sum(reached <= alpha * sums[-1] for reached in sums))
    return with_ties(order, count, logits, 0.0)


Reference = Callable[[list[float], float, int, float], set[int]]
CASES: dict[str, tuple[str, Reference, bool]] = {
    "typical_p": ("typical_p", typical, False),
    "tfs": ("tfs_z", tail_free, False),
    "top_h": ("top_h", lambda logits, alpha, min_keep, temperature: top_h(logits, alpha, temperature), True),
}


@pytest.mark.parametrize("name", CASES)
@random_seeds(1000, shares_fixtures=True)
def test_equals_the_formula(seed: int, name: str, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    field, reference, by_default = CASES[name]
    logits = random_logits(generator, random_size(generator))
    value, temperature = generator.uniform(0.02, 0.98), generator.choice([0.5, 1.0, 3.0])
    params: dict[str, Any] = {field: value}
    min_keep = 1 if name == "tfs" else 0
    if name != "top_h" and generator.random() < 0.3:
        params["min_keep"] = min_keep = generator.choice([0, 1, 2, 10, 10**18])
    after = by_default
    if generator.random() < 0.5:
        params["after_temperature"] = after = generator.random() < 0.5
    edited = call(name, make_row, logits, params, temperature=temperature)
    used = temperature if after else 1.0
    assert kept(edited)
    assert torch.equal(edited[edited.isfinite()], logits[edited.isfinite()])
    if name == "typical_p":  # a token that is nearly as typical as the last one may or may not stay
        assert kept(edited) <= reference(values(logits), min(1.0, value + SLACK), min_keep, used)
    else:
        assert reference(values(logits), value - SLACK, min_keep, used) <= kept(edited)
        assert kept(edited) <= reference(values(logits), value + SLACK, min_keep, used)
    of_kept = math.fsum(probabilities(values(logits), used)[token] for token in kept(edited))
    if name == "typical_p":
        assert of_kept >= value - SLACK


@random_seeds(1000, shares_fixtures=True)
def test_min_k_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    logits = random_logits(generator, random_size(generator))
    tau = generator.choice([0.0, 3.0, 100.0])
    params = {} if tau == 3 else {"min_k_tau": tau}
    temperature = generator.choice([0.5, 1.0, 3.0])
    edited = call("min_k", make_row, logits, params, temperature=temperature)
    assert kept(edited) == min_k(values(logits), tau)
    assert torch.equal(edited[edited.isfinite()], logits[edited.isfinite()])


@pytest.mark.parametrize("vocab_size", [120, 2000, 49_152])
@random_seeds(60, shares_fixtures=True)
def test_equals_transformers(seed: int, vocab_size: int, make_row: MakeRow) -> None:
    generator = random.Random(seed)
    torch_generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=torch_generator) * generator.choice([0.5, 2, 5])
    value, temperature = generator.uniform(0.05, 0.95), generator.choice([0.5, 1.0, 2.0])
    ids = torch.zeros(3, 1, dtype=torch.int64)
    scores = logits / temperature
    for name, params, warper in (
        ("typical_p", {"typical_p": value, "after_temperature": True}, lambda v: TypicalLogitsWarper(v)),
        ("top_h", {"top_h": value}, lambda v: TopHLogitsWarper(v)),
    ):
        edited = call(name, make_row, logits, params, temperature=temperature)
        less, more = (warper(value + slack)(ids, scores).isfinite() for slack in (-1e-4, 1e-4))  # type: ignore[no-untyped-call]
        assert (less <= edited.isfinite()).all()
        assert (edited.isfinite() <= more).all()


@pytest.mark.parametrize("name", ["typical_p", "tfs", "min_k"])
@random_seeds(40, shares_fixtures=True)
def test_first_tokens_decide_as_all_do(
    seed: int, name: str, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of tokens that are looked at first makes no difference."""
    generator = random.Random(seed)
    logits = torch.cat([random_logits(generator, 2000) for _ in range(4)])
    params = {"typical_p": {"typical_p": 0.7}, "tfs": {"tfs_z": 0.8}, "min_k": {}}[name]
    found = []
    for widths in ((), (64, 512), (3, 5, 700)):
        monkeypatch.setattr(RankedRule, "widths", widths)
        found.append(call(name, make_row, logits, params))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("name", "params"),
    [("typical_p", {"typical_p": 1}), ("tfs", {"tfs_z": 1.0})],
)
def test_off(name: str, params: dict[str, Any], make_row: MakeRow) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(call(name, make_row, logits, params), logits)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("typical_p", {}, "typical_p: missing from custom_params, expected a number above 0 and at most 1"),
        ("typical_p", {"typical_p": 0}, "typical_p: expected a number above 0 and at most 1, got 0"),
        ("typical_p", {"typical_p": 1.1}, "typical_p: expected a number above 0 and at most 1, got 1.1"),
        ("typical_p", {"typical_p": 0.5, "min_keep": -1}, "min_keep: expected an integer, 0 or greater, got -1"),
        ("tfs", {"tfs_z": -0.1}, "tfs_z: expected a number from 0 to 1, got -0.1"),
        ("tfs", {"tfs": 0.5}, "tfs_z: missing"),
        ("tfs", {"tfs_z": 0.5, "min_keep": 1.5}, "min_keep: expected an integer"),
        ("min_k", {"min_k_tau": -1}, "min_k_tau: expected a number from 0 to 1e9, got -1"),
        ("min_k", {"min_k_tau": math.inf}, "min_k_tau: expected a number from 0 to 1e9, got inf"),
        ("top_h", {"top_h": True}, "top_h: expected a number above 0 and at most 1, got True"),
        ("top_h", {"top_h": 0.5, "after_temperature": None}, "after_temperature: expected true or false, got None"),
    ],
)
def test_refuses(name: str, params: dict[str, Any], message: str) -> None:
    processor: Any = installed_processors().make(name)
    with pytest.raises(ValueError, match=f"^{message}"):
        processor.prepare(params, MODEL)
