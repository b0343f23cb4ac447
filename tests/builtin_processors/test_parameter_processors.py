from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate
from logitship.sampler.sampling_params import SamplingParams

DRAFTS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "vllm_min_tokens_drafts.json").read_text())


def new_processor() -> MinTokensLogitsProcessor:
    return MinTokensLogitsProcessor(None, torch.device("cpu"), False)


def masked(logits: torch.Tensor) -> list[list[int]]:
    return [[token for token, value in enumerate(row) if value == -math.inf] for row in logits.tolist()]


def forbidden(processor: MinTokensLogitsProcessor, rows: int) -> list[list[int]]:
    return masked(processor.apply(torch.zeros(rows, 6)))


def test_stop_tokens_are_forbidden_until_the_minimum() -> None:
    processor = new_processor()
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({1}), eos_token_ids=frozenset({4}))
    first: list[int] = []
    second = [0]
    processor.update_state(BatchUpdate(3, [], [(0, params, [], first), (2, params, [], second)], []))
    assert forbidden(processor, 3) == [[1, 4], [], [1, 4]]
    first.append(0)
    second.append(0)
    processor.update_state(None)
    assert forbidden(processor, 3) == [[1, 4], [], []]
    first.append(0)
    processor.update_state(None)
    assert forbidden(processor, 3) == [[], [], []]


def test_no_end_tokens() -> None:
    processor = new_processor()
    processor.update_state(BatchUpdate(1, [], [(0, SamplingParams(min_tokens=2), [], [])], []))
    assert forbidden(processor, 1) == [[]]


def test_stop_tokens_stay_forbidden_if_nothing_else_is_left() -> None:
    processor = new_processor()
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({0, 1}))
    processor.update_state(BatchUpdate(1, [], [(0, params, [], [])], []))
    assert masked(processor.apply(torch.zeros(1, 2))) == [[0, 1]]
    assert masked(processor.apply_with_spec_decode(torch.zeros(1, 2), [1])) == [[0, 1]]


def test_is_not_argmax_invariant() -> None:
    assert not new_processor().is_argmax_invariant()


# ---- with draft tokens


@pytest.mark.parametrize("case", DRAFTS["cases"], ids=range(len(DRAFTS["cases"])))
def test_draft_rows_as_in_vllm(case: dict[str, Any]) -> None:
    processor = new_processor()
    added = [
        (
            row,
            SamplingParams(min_tokens=request["min_tokens"], stop_token_ids=request["stop_token_ids"]),
            [],
            [7] * request["output_length"],
        )
        for row, request in enumerate(case["requests"])
    ]
    processor.update_state(BatchUpdate(len(added), [], added, []))
    logits = torch.zeros(sum(case["num_draft_tokens"]), DRAFTS["vocab_size"])
    assert masked(processor.apply_with_spec_decode(logits, case["num_draft_tokens"])) == case["forbidden"]


def test_draft_rows_follow_the_output_as_it_grows() -> None:
    """Also without an update in between; the recording has each request at one length only."""
    processor = new_processor()
    params = SamplingParams(min_tokens=5, stop_token_ids=frozenset({1}))
    plain, output = SamplingParams(), [0, 0]
    processor.update_state(BatchUpdate(3, [], [(0, plain, [], []), (2, plain, [], []), (1, params, [], output)], []))

    def rows_of_second() -> list[list[int]]:
        return masked(processor.apply_with_spec_decode(torch.zeros(7, 3), [2, 4, 1]))

    assert rows_of_second() == [[], [], [1], [1], [1], [], []]
    output += [0, 0]
    assert rows_of_second() == [[], [], [1], [], [], [], []]
    output += [0]
    assert rows_of_second() == [[]] * 7


def test_each_row_gets_its_own_biases() -> None:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    first, second = SamplingParams(logit_bias={0: 1.5, 3: -2.0}), SamplingParams(logit_bias={3: 7.0})
    processor.update_state(BatchUpdate(3, [], [(0, first, [], []), (2, second, [], [])], []))
    assert processor.apply(torch.ones(3, 4)).tolist() == [
        [2.5, 1.0, 1.0, -1.0],
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, 8.0],
    ]


@pytest.mark.parametrize("count", [10, 3000])
def test_many_biases_are_added_as_few_are(count: int) -> None:
    logits = torch.randn(3, 5000)
    logits[:, 7] = -torch.inf
    biases = {token: float(np.float32(token / 7)) for token in range(count)}
    expected = logits.clone()
    for token, bias in biases.items():
        expected[0, token] += bias
        expected[2, token] += bias
    expected[1, 3] += 2.0
    params = SamplingParams(logit_bias=biases)
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    other = SamplingParams(logit_bias={3: 2.0})
    processor.update_state(BatchUpdate(3, [], [(0, params, [], []), (1, other, [], []), (2, params, [], [])], []))
    assert torch.equal(processor.apply(logits.clone()), expected)
    drafts = processor.apply_with_spec_decode(logits[[0, 0, 1]].clone(), [2, 1, 0])
    assert torch.equal(drafts[0], expected[0])
    assert torch.equal(drafts[1], drafts[0])
    assert torch.equal(drafts[2], expected[1])


def test_no_biases_are_a_noop() -> None:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    processor.update_state(None)
    assert processor.apply(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert not processor.is_argmax_invariant()


def min_p_applied(logits: torch.Tensor, *min_p: float) -> torch.Tensor:
    processor = MinPLogitsProcessor(None, torch.device("cpu"), False)
    added: list[AddedRequest] = [(row, SamplingParams(min_p=value), [], []) for row, value in enumerate(min_p)]
    processor.update_state(BatchUpdate(len(added), [], added, []))
    return processor.apply(logits.clone())


@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4])
def test_min_p_against_the_definition(scale: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 500) * scale
    min_p = [0.0, 0.01, 0.4, 0.999]
    got = min_p_applied(logits, *min_p)
    probabilities = logits.double().softmax(-1)
    kept = probabilities >= probabilities.amax(-1, keepdim=True) * torch.tensor(min_p, dtype=torch.float64)[:, None]
    assert torch.equal(got, logits.masked_fill(~kept, -math.inf))


def test_min_p_of_one_keeps_ties() -> None:
    assert min_p_applied(torch.tensor([[1.0, 2.0, 2.0, -math.inf]]), 1.0).tolist() == [[-math.inf, 2.0, 2.0, -math.inf]]


def test_min_p_keeps_the_most_likely_token() -> None:
    assert MinPLogitsProcessor(None, torch.device("cpu"), False).is_argmax_invariant()
