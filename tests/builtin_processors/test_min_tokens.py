from __future__ import annotations

import math

import torch

from logitship.builtin_processors.min_tokens import MinTokensLogitsProcessor
from logitship.sampler.interface import BatchUpdate
from logitship.sampler.sampling_params import SamplingParams


def forbidden(processor: MinTokensLogitsProcessor, rows: int) -> list[list[int]]:
    logits = processor.apply(torch.zeros(rows, 6))
    return [[token for token, value in enumerate(row) if value == -math.inf] for row in logits.tolist()]


def test_stop_tokens_are_forbidden_until_the_minimum() -> None:
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
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


def test_without_end_tokens_there_is_nothing_to_do() -> None:
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.update_state(BatchUpdate(1, [], [(0, SamplingParams(min_tokens=2), [], [])], []))
    assert forbidden(processor, 1) == [[]]


def test_it_may_change_the_argmax() -> None:
    assert not MinTokensLogitsProcessor(None, torch.device("cpu"), False).is_argmax_invariant()
