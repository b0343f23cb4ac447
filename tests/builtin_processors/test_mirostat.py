from __future__ import annotations

import copy
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from logitship.builtin_processors import Mirostat2LogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.builtin_processors.sampling_rows import MakeRow, kept, probabilities, random_logits, random_size, values
from tests.helpers.random_cases import random_seeds

MODEL = ModelView(100, frozenset(), None)


def remaining(logits: list[float], limit: float, temperature: float) -> dict[int, float]:
    """Return the tokens that llama.cpp's `llama_sampler_mirostat_v2_apply` samples from, and their probabilities."""
    of_tokens = probabilities(logits, temperature)
    stay = {token: p for token, p in enumerate(of_tokens) if p > 0 and -math.log2(p) <= limit}
    if not stay:
        best = max(of_tokens)
        stay = {token: p for token, p in enumerate(of_tokens) if p == best}
    total = math.fsum(stay.values())
    return {token: p / total for token, p in stay.items()}


def limit_of(row: dict[str, Any]) -> float:
    """Return the limit of a row's next step."""
    request = row["__req__"]
    limit: float = request.state["mirostat_2"].before(len(request.output_ids)).batch[0, 0].item()
    return limit


@random_seeds(300, shares_fixtures=True)
def test_equals_the_formula(seed: int, make_row: MakeRow) -> None:
    """Each step samples a token that stays, and moves the limit as the formula says."""
    generator = random.Random(seed)
    size, temperature = random_size(generator), generator.choice([0.5, 1.0, 3.0])
    tau, eta = generator.choice([0.5, 3.0, 5.0]), generator.choice([0.1, 0.5, 1.0])
    params = {} if (tau, eta) == (5.0, 0.1) else {"mirostat_tau": tau, "mirostat_eta": eta}
    sampling = SamplingParams(temperature=temperature, seed=seed)
    row = make_row(params, [1], [], vocab_size=size, sampling_params=sampling)
    processor, limit = Mirostat2LogitsProcessor(), 2 * tau
    for _ in range(12):
        logits = random_logits(generator, size)
        (token,) = kept(processor(logits.clone(), [row]))
        (loose, strict) = (remaining(values(logits), limit + slack, temperature) for slack in (1e-3, -1e-3))
        assert token in loose
        surprises = [-math.log2(each[token]) for each in (loose, strict) if token in each]
        limits = [limit - eta * (surprise - tau) for surprise in surprises]
        row["__req__"].output_ids.append(token)
        found = limit_of(row)
        assert min(limits) - 1e-3 <= found <= max(limits) + 1e-3
        limit = found  # float32 may cut elsewhere
    assert math.isfinite(limit)


def test_tokens_are_sampled_with_their_probabilities(make_row: MakeRow) -> None:
    """Chi-square of 20,000 tokens with a fixed limit."""
    count, logits = 20_000, torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0, -3.0, -math.inf]])
    params = {"mirostat_tau": 2.2, "mirostat_eta": 0.0}
    expected = remaining(values(logits), 4.4, 0.8)
    assert len(expected) == 4
    rows = [
        make_row(params, [1], [0] * length, vocab_size=7, sampling_params=SamplingParams(temperature=0.8, seed=3))
        for length in range(count)
    ]
    tokens = Mirostat2LogitsProcessor()(logits.repeat(count, 1), rows).argmax(dim=1).tolist()
    counts = Counter(tokens)
    assert counts.keys() == expected.keys()
    chi_square = sum((counts[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_seed_repeats_and_mean_surprise_reaches_the_target(make_row: MakeRow) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(1, 500, generator=generator) * 2 for _ in range(300)]

    def run(seed: int) -> tuple[list[int], list[float]]:
        row = make_row({"mirostat_tau": 3.0}, [1], [], vocab_size=500, sampling_params=SamplingParams(seed=seed))
        processor, surprises = Mirostat2LogitsProcessor(), []
        for logits in steps:
            limit = limit_of(row) if row["__req__"].output_ids else 6.0
            (token,) = kept(processor(logits.clone(), [row]))
            row["__req__"].output_ids.append(token)
            surprises.append(-math.log2(remaining(values(logits), limit + 1e-4, 1.0)[token]))
        return row["__req__"].output_ids, surprises

    tokens, surprises = run(1)
    assert run(1)[0] == tokens
    assert run(2)[0] != tokens
    assert abs(sum(surprises[100:]) / 200 - 3.0) < 0.3


def test_drafts_and_forks_have_their_own_limits(make_row: MakeRow) -> None:
    """A copy behind draft tokens, and the request after they are rejected, equal a sequence without drafts."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(1, 50, generator=generator) * 3 for _ in range(8)]
    processor = Mirostat2LogitsProcessor()

    def row(output: list[int], state: dict[str, Any]) -> dict[str, Any]:
        return make_row({}, [1], output, state, vocab_size=50, sampling_params=SamplingParams(seed=4))

    alone: dict[str, Any] = {}
    expected = [processor(logits.clone(), [row([7] * place, alone)]) for place, logits in enumerate(steps)]
    state: dict[str, Any] = {}
    for place in range(0, 8, 2):
        assert torch.equal(processor(steps[place].clone(), [row([7] * place, state)]), expected[place])
        draft = copy.deepcopy(state)
        assert torch.equal(processor(steps[place + 1].clone(), [row([7] * (place + 1), draft)]), expected[place + 1])
        processor(torch.randn(1, 50, generator=generator), [row([7] * (place + 2), draft)])
        # Rejected without a copy: the same state goes on from an earlier token.
        processor(torch.randn(1, 50, generator=generator), [row([7] * (place + 1), state)])
        assert torch.equal(processor(steps[place + 1].clone(), [row([7] * (place + 1), state)]), expected[place + 1])


def test_row_without_a_token_stays_without(make_row: MakeRow) -> None:
    logits = torch.stack([torch.full((9,), -math.inf), torch.zeros(9)])
    rows = [make_row({}, [1], [], vocab_size=9) for _ in range(2)]
    edited = Mirostat2LogitsProcessor()(logits, rows)
    assert edited.isfinite().sum(dim=1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mirostat_tau": -1}, "mirostat_tau: expected a number from 0 to 1000, got -1"),
        ({"mirostat_tau": "5"}, "mirostat_tau: expected a number from 0 to 1000, got '5'"),
        ({"mirostat_eta": 1.1}, "mirostat_eta: expected a number from 0 to 1, got 1.1"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Mirostat2LogitsProcessor().prepare(params, MODEL)
