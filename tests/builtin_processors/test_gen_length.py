from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship.builtin_processors import GenLengthLogitsProcessor
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow

EOS, NEW_LINE = 2, 4


def boost(params: dict[str, Any], prompt: list[int], output: list[int], model: ModelView, make_row: MakeRow) -> float:
    """Return the boost of the EOS token."""
    row = make_row(params, prompt, output, eos_token_ids=model.eos_token_ids, tokenizer=model.tokenizer)
    return float(GenLengthLogitsProcessor()(torch.zeros(1, 48), [row])[0, EOS])


def test_grows_with_the_output(zoo_model: ModelView, make_row: MakeRow) -> None:
    boosts = [boost({"boost_factor": 2, "p": 1}, [1], [20] * n, zoo_model, make_row) for n in (0, 5, 10, 1000)]
    assert boosts == [0, 1, 2, 200]


def test_the_first_step(zoo_model: ModelView, make_row: MakeRow) -> None:
    """The original's two variants differ here.

    An EOS token in the prompt does not count, and a prompt may end within a sentence.
    """
    params: dict[str, Any] = {"boost_factor": 3.0, "p": 0}
    assert boost(params, [EOS, 20], [], zoo_model, make_row) == 3
    assert boost(params | {"complete_sentences": True}, [20, NEW_LINE], [], zoo_model, make_row) == 3
    assert boost(params | {"complete_sentences": True}, [NEW_LINE, 20], [], zoo_model, make_row) == 0
    assert boost(params | {"complete_sentences": True}, [], [], zoo_model, make_row) == 0


def test_removed_end_token_does_not_count(zoo_model: ModelView, make_row: MakeRow) -> None:
    state: dict[str, Any] = {}
    for output, expected in (([20, EOS], 0), ([20], 1), ([20, 20], 2), ([20, EOS, 20], 0)):
        row = make_row(
            {"boost_factor": 10, "p": 1}, [1], output, state, eos_token_ids={EOS}, tokenizer=zoo_model.tokenizer
        )
        assert GenLengthLogitsProcessor()(torch.zeros(1, 48), [row])[0, EOS] == expected


def test_boost_is_clamped(zoo_model: ModelView, make_row: MakeRow) -> None:
    params = {"boost_factor": -1e9, "p": 20}
    assert boost(params, [1], [20] * 100_000, zoo_model, make_row) == pytest.approx(-1e9)


def test_no_rows_is_a_noop() -> None:
    logits = torch.zeros(0, 48)
    assert GenLengthLogitsProcessor()(logits, []) is logits
    assert GenLengthLogitsProcessor()(logits) is logits


@pytest.mark.parametrize(
    "params", [{"boost_factor": 1}, {"boost_factor": -0.5, "p": 0, "complete_sentences": True, "boost_token_str": None}]
)
def test_accepts(params: dict[str, Any], zoo_model: ModelView) -> None:
    assert GenLengthLogitsProcessor().prepare(params, zoo_model).target.token == EOS


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "boost_factor: missing from custom_params, expected a number from -1e9 to 1e9"),
        ({"boost_factor": "1"}, "boost_factor: expected a number from -1e9 to 1e9, got '1'"),
        ({"boost_factor": float("nan")}, "boost_factor: expected a number from -1e9 to 1e9, got nan"),
        ({"boost_factor": 1e10}, r"boost_factor: expected a number from -1e9 to 1e9, got 10000000000\.0"),
        ({"boost_factor": 1, "p": -1}, "p: expected an integer from 0 to 20, got -1"),
        ({"boost_factor": 1, "p": 2.5}, "p: expected an integer from 0 to 20, got 2.5"),
        ({"boost_factor": 1, "complete_sentences": "yes"}, "complete_sentences: expected true or false, got 'yes'"),
        (
            {"boost_factor": 1, "boost_token_str": "a b c"},
            "boost_token_str: expected a string of one token, but 'a b c' is 5",
        ),
    ],
)
def test_refuses(params: dict[str, Any] | None, message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        GenLengthLogitsProcessor().prepare(params, zoo_model)
