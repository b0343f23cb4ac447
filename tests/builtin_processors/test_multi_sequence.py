from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors import MultiSequenceLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "rtp_llm.json").read_text())["multi_seq"]
NOT_CREATED = [case["name"] for case in RECORDED if not case["expect_created"]]


@pytest.mark.parametrize("case", [case for case in RECORDED if case["expect_created"]], ids=lambda case: case["name"])
def test_recorded(case: dict[str, Any], make_row: MakeRow, recorded_logits: Callable[[Any], torch.Tensor]) -> None:
    """RTP-LLM gets the finished sequences as an argument; here, they follow from the outputs."""
    eos = case["eos_token_id"]
    for step in case["steps"]:
        logits = recorded_logits(step["logits_in"])
        first, end = step.get("rows_range", (0, len(logits)))
        outputs = [[0, eos, 0] if finished else [0] for finished in step["finished_mask"][first:end]]
        rows = [make_row({"eos_token_ids": [eos]}, [eos], output) for output in outputs]
        MultiSequenceLogitsProcessor()(logits[first:end], rows)
        assert torch.equal(logits, recorded_logits(step["expect_logits"]))


def test_recorded_requests_without_processor() -> None:
    """RTP-LLM only uses it with several sequences per request; here, a request enables it."""
    assert NOT_CREATED == ["not_created_single", "not_created_zero_returns"]


def test_default_is_the_models_end_tokens(make_row: MakeRow) -> None:
    """EOS tokens in the prompt and removed EOS tokens do not count."""
    state: dict[str, Any] = {}
    left = []
    for output in ([], [4], [4, 1], [4, 1, 3], [4, 1, 3, 0], [4, 1], [4, 1, 5]):
        logits = torch.zeros(1, 6)
        row = make_row({}, [3], output, state, eos_token_ids=frozenset({3, 5}))
        assert MultiSequenceLogitsProcessor()(logits, [row]) is logits
        left.append(logits[0].isfinite().nonzero().flatten().tolist())
    everything, end = [0, 1, 2, 3, 4, 5], [3, 5]
    assert left == [everything, everything, everything, end, end, everything, end]


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 12)
    assert MultiSequenceLogitsProcessor()(logits, []) is logits
    assert MultiSequenceLogitsProcessor()(logits) is logits


def test_prepare() -> None:
    model = ModelView(6, frozenset({5, 3}), None)
    processor = MultiSequenceLogitsProcessor()
    assert processor.prepare(None, model).token_ids.tolist() == [3, 5]
    assert processor.prepare({"eos_token_ids": None}, model).token_ids.tolist() == [3, 5]
    assert processor.prepare({"eos_token_ids": [4, 1, 4]}, model).token_ids.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "^eos_token_ids: expected at least one EOS token, the model has none$"),
        ({"eos_token_ids": []}, "^eos_token_ids: expected at least one EOS token, the list is empty$"),
        ({"eos_token_ids": 2}, "^eos_token_ids: expected a list of token ids, got 2$"),
        ({"eos_token_ids": [6]}, r"^eos_token_ids: token id 6 is outside the vocabulary \(0 to 5\)$"),
    ],
)
def test_refuses(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiSequenceLogitsProcessor().prepare(params, ModelView(6, frozenset(), None))
