from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors import MaxTimeLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow

EOS = 2


def test_time_is_per_sequence(zoo_model: ModelView, make_row: MakeRow) -> None:
    clock = SimpleNamespace(now=50.0)
    processor = MaxTimeLogitsProcessor(lambda: clock.now)
    rows = [
        make_row({"max_time": seconds}, [1], [], eos_token_ids=zoo_model.eos_token_ids, tokenizer=zoo_model.tokenizer)
        for seconds in (0, 1, 2.5)
    ]
    ended = []
    for _ in range(5):
        got = processor(torch.arange(48.0).repeat(3, 1), rows)
        ended.append([row for row in range(3) if int(got[row].argmax()) == EOS])
        for row in rows:
            row["__req__"].output_ids.append(20)
        clock.now += 1
    assert ended == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_forbidden_end_token_is_enforced_later(zoo_model: ModelView, make_row: MakeRow) -> None:
    clock = SimpleNamespace(now=0.0)
    processor = MaxTimeLogitsProcessor(lambda: clock.now)
    row = make_row({"max_time": 1}, [1], [], eos_token_ids=zoo_model.eos_token_ids, tokenizer=zoo_model.tokenizer)
    sampled = []
    for forbidden in (False, True, True, False):
        logits = torch.arange(48.0).unsqueeze(0)
        if forbidden:
            logits[0, EOS] = -torch.inf
        sampled.append(int(processor(logits, [row]).argmax()))
        row["__req__"].output_ids.append(sampled[-1])
        clock.now += 2
    assert sampled == [47, 47, 47, EOS]


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 48)
    assert MaxTimeLogitsProcessor()(logits, []) is logits
    assert MaxTimeLogitsProcessor()(logits) is logits


@pytest.mark.parametrize("params", [{"max_time": 0}, {"max_time": 0.5, "boost_token_str": "</think>"}])
def test_accepts(params: dict[str, Any], zoo_model: ModelView) -> None:
    MaxTimeLogitsProcessor().prepare(params, zoo_model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "max_time: missing from custom_params, expected a number of seconds, 0 or greater"),
        ({"max_time": -1}, "max_time: expected a number of seconds, 0 or greater, got -1"),
        ({"max_time": float("inf")}, "max_time: expected a number of seconds, 0 or greater, got inf"),
        (
            {"max_time": 1, "boost_token_str": "12"},
            "boost_token_str: expected a string of one token, but '12' is 2 tokens",
        ),
    ],
)
def test_refuses(params: dict[str, Any], message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MaxTimeLogitsProcessor().prepare(params, zoo_model)
