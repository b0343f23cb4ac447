from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from logitship.client.sampling_record import BITS, KEPT, REMOVED
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.ops import sampling_masks
from logitship.sampler.ops.sampling_masks import RowMask
from logitship.sampler.ops.top_k_top_p import kept_tokens
from logitship.sampler.row_errors import SamplingMasksTooLargeError, SamplingMaskTooLongError
from logitship.sampler.sampler import Sampler, SamplerOutput
from logitship.sampler.sampling_params import InvalidSamplingParams, SamplingParams
from tests.helpers.random_cases import random_seeds

CPU = torch.device("cpu")


def sample(logits: torch.Tensor, rows: list[SamplingParams]) -> SamplerOutput:
    sampler = Sampler(logits.shape[1], CPU, LogitsProcessors([]), None)
    sampler.update_state(BatchUpdate(len(rows), [], [(row, params, [], []) for row, params in enumerate(rows)], []))
    return sampler.sample(logits.clone())


def tokens_of(mask: RowMask, vocab_size: int) -> set[int]:
    """Return the tokens that could be sampled."""
    if mask.form == KEPT:
        return set(mask.tokens.tolist())
    if mask.form == REMOVED:
        return set(range(vocab_size)) - set(mask.tokens.tolist())
    assert mask.form == BITS
    return set(np.flatnonzero(np.unpackbits(mask.tokens, bitorder="little")[:vocab_size]).tolist())


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 0.1, 0.7, 1.0, 3.0]),
        top_k=rng.choice([-1, 1, 5, 700, vocab_size]),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.3]),
        allowed_token_ids=rng.choice([None, rng.sample(range(vocab_size), rng.choice([1, vocab_size // 2]))]),
        seed=rng.getrandbits(60),
        return_sampling_mask=True,
        sampling_mask_format="packed",
    )


@random_seeds(30)
def test_masks_are_the_distributions_that_tokens_were_sampled_from(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([7, 300, 5000])
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.01, 1, 8])
    rows = [random_params(rng, vocab_size) for _ in range(6)]
    rows[2] = replace(rows[2], return_sampling_mask=False)
    output = sample(logits, rows)
    assert output.token_ids == sample(logits, [replace(each, return_sampling_mask=False) for each in rows]).token_ids
    for row, (params, token, mask) in enumerate(zip(rows, output.token_ids, output.masks, strict=True)):
        if row == 2:
            assert mask is None
            continue
        assert mask is not None
        edited = logits[row].clone()
        if params.allowed_token_ids is not None:
            edited[[each for each in range(vocab_size) if each not in params.allowed_token_ids]] = -math.inf
        if params.greedy:
            expected = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(token), True)
        else:
            edited = edited - edited.max()
            edited /= params.temperature
            expected = kept_tokens(edited, params.top_k, params.top_p)
        assert tokens_of(mask, vocab_size) == set(expected.nonzero()[:, 0].tolist())
        logprob = edited.masked_fill(~expected, -math.inf).log_softmax(-1)[token]
        assert mask.logprobs.tolist() == pytest.approx([float(logprob)], abs=2e-6)
        sizes = [2 * len(tokens_of(mask, vocab_size)), 2 * int((~expected).sum()), -(-vocab_size // 8)]
        assert sampling_masks._num_bytes(mask, vocab_size) == min(sizes)


def test_lists_begin_with_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, -1.0]])
    params = SamplingParams(seed=1, top_k=3, return_sampling_mask=True)
    (mask,) = sample(logits, [params]).masks
    assert mask is not None
    assert mask.form == KEPT
    assert mask.tokens.tolist() == [1, 3, 2]
    (support,) = sample(logits, [replace(params, sampling_logprobs_mode="support")]).masks
    assert support is not None
    expected = torch.tensor([3.0, 3.0, 1.0]).log_softmax(-1).tolist()
    assert support.logprobs.tolist() == pytest.approx(expected)
    greedy = SamplingParams(temperature=0, return_sampling_mask=True, sampling_logprobs_mode="support")
    (mask,) = sample(logits, [greedy]).masks
    assert mask is not None
    assert (mask.tokens.tolist(), mask.logprobs.tolist()) == ([1], [0.0])  # as SGLang


def test_list_of_a_tie_that_is_too_long_ends_its_request_alone() -> None:
    logits = torch.zeros(2, 5000)
    rows = [SamplingParams(seed=1, top_k=4, return_sampling_mask=True), SamplingParams(seed=1, top_k=4)]
    output = sample(logits, rows)
    ((row, fault),) = output.faults
    assert row == 0
    assert isinstance(fault, SamplingMaskTooLongError)
    assert "5000 tokens could be sampled, and a list has at most 4096" in str(fault)
    assert output.masks == [None, None]


@pytest.mark.parametrize(
    ("edits", "limit"),
    [({}, 25), ({"return_sampling_edits": True, "repetition_penalty": 2.0}, 92)],
)
def test_packed_masks_of_a_sequence_are_bounded(
    edits: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_masks, "MAX_BYTES", limit)
    params = SamplingParams(seed=1, top_k=5, return_sampling_mask=True, sampling_mask_format="packed", **edits)
    sampler = Sampler(1000, CPU, LogitsProcessors([]), None)
    sampler.update_state(BatchUpdate(1, [], [(0, params, list(range(1000)), [])], []))
    outputs = [sampler.sample(torch.randn(1, 1000)) for _ in range(3)]
    assert [bool(output.faults) for output in outputs] == [False, False, True]  # 10 bytes each, and 21 of edits
    ((_, fault),) = outputs[-1].faults
    assert isinstance(fault, SamplingMasksTooLargeError)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "return_sampling_mask"),
        ({"top_k": 4097}, "return_sampling_mask"),
        ({"top_k": 5, "sampling_mask_format": "text"}, "sampling_mask_format"),
        ({"top_k": 5, "sampling_logprobs_mode": "all"}, "sampling_logprobs_mode"),
        ({"sampling_mask_format": "packed", "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode"),
    ],
)
def test_requests_that_are_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidSamplingParams) as raised:
        SamplingParams(return_sampling_mask=True, **values)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_token_that_cannot_have_been_sampled() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0])
    assert sampling_masks.packed_mask(logits, 2).logprobs[0] == pytest.approx(1 - math.log(1 + math.e), abs=1e-6)
    with pytest.raises(ValueError, match="token 1 cannot have been sampled"):
        sampling_masks.packed_mask(logits, 1)
