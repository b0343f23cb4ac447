"""Batch invariance: a row's results are bitwise equal alone, in any batch, in any order and as a draft."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.ops.logprobs import RowLogprobs, token_logprobs
from logitship.sampler.sampler import Sampler
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")
ROWS = 19
VOCABS = (77, 1003, pytest.param(49152, marks=pytest.mark.thorough))
"""Two of them are no multiple of the vector width, so rows start at unaligned addresses."""


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Row:
    """A row of the batch with its logits."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits: torch.Tensor


def random_row(rng: random.Random, vocab_size: int) -> Row:
    def tokens(count: int) -> list[int]:
        return rng.sample(range(vocab_size), count)

    temperature = rng.choice([0.0, 0.3, 0.8, 1.7])
    params = SamplingParams(
        temperature=temperature,
        top_k=rng.choice([-1, -1, 5, 600]),
        top_p=rng.choice([1.0, 0.9, 0.4]) if temperature > 0 else 1.0,
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        presence_penalty=rng.choice([0.0, -0.3]),
        logit_bias=rng.choice([{}, {token: rng.uniform(-3, 3) for token in tokens(6)}]),
        allowed_token_ids=rng.choice([None, None, frozenset(tokens(vocab_size // 2))]),
        seed=rng.randrange(2**64),
        logprobs=rng.choice([0, 5, 20]),
        logprobs_mode=rng.choice(["raw_logprobs", "processed_logprobs"]),
    )
    # From nearly flat, where top-p needs the whole vocabulary, to peaked.
    logits = torch.randn(vocab_size) * rng.choice([0.01, 1.0, 4.0])
    return Row(params, tokens(9), tokens(rng.randint(0, 9)), logits)


def sampler_of(rows: list[Row], vocab_size: int) -> Sampler:
    types = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    sampler = Sampler(vocab_size, CPU, LogitsProcessors([each(None, CPU, False) for each in types]), None)
    added = [(number, row.params, row.prompt, row.output) for number, row in enumerate(rows)]
    sampler.update_state(BatchUpdate(len(rows), [], added, []))
    return sampler


Sampled = list[tuple[int, RowLogprobs | None]]
"""Token and log-probabilities of each row, compared exactly."""


def sample(rows: list[Row], chosen: list[int] | None = None) -> Sampled:
    vocab_size = len(rows[0].logits)
    logits = torch.stack([rows[number].logits for number in chosen or range(len(rows))])
    result = sampler_of(rows, vocab_size).sample(logits, chosen)
    assert result.faults == []
    return list(zip(result.token_ids, result.logprobs, strict=True))


@pytest.mark.parametrize("vocab_size", VOCABS)
@random_seeds(3, shares_fixtures=True)
def test_rows_are_bitwise_batch_invariant(seed: int, vocab_size: int, threads: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = [random_row(rng, vocab_size) for _ in range(ROWS)]
    alone = [sample([row])[0] for row in rows]
    assert all(record is not None for _, record in alone)
    assert sample(rows) == alone
    order = rng.sample(range(ROWS), ROWS)
    assert sample([rows[number] for number in order]) == [alone[number] for number in order]
    some = sorted(rng.sample(range(ROWS), 7))
    assert sample([rows[number] for number in some]) == [alone[number] for number in some]
    assert sample(rows, some) == [alone[number] for number in some]


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_prompt_logprobs_are_independent_of_chunks(vocab_size: int, threads: int) -> None:
    rng = random.Random(vocab_size)
    torch.manual_seed(0)
    logits = torch.randn(40, vocab_size) * 3
    tokens = [rng.randrange(vocab_size) for _ in range(40)]
    whole = token_logprobs(logits, tokens, [7] * 40)
    begin = 0
    while begin < 40:
        end = min(40, begin + rng.randint(1, 9))
        assert token_logprobs(logits[begin:end].clone(), tokens[begin:end], [7] * (end - begin)) == whole[begin:end]
        begin = end


def test_logprobs_are_independent_of_other_rows_top(threads: int) -> None:
    """The number of most likely tokens to compute is chosen for all rows together."""
    torch.manual_seed(0)
    logits = torch.randn(3, 5000).mul(4).round() / 4  # with ties
    [few] = token_logprobs(logits[:1], [3], [2])
    assert token_logprobs(logits, [3, 4, 5], [2, 900, 0])[0] == few
