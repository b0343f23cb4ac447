from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.builtin_processors import TriggerPhraseLogitsProcessor
from logitship.sampler.processors.request_view import ModelView

THANKS = 27


def test_timer_is_per_sequence(zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]) -> None:
    """In the original, all rows of a call share one timer, so a row's phrase delays the others'."""
    clock = SimpleNamespace(now=1e7)
    processor = TriggerPhraseLogitsProcessor(lambda: clock.now)
    params = {"phrase": "Thanks", "trigger_time": 2, "trigger_count": 2}
    rows = [make_row(params, [1], [], eos_token_ids=frozenset({2}), tokenizer=zoo_model.tokenizer) for _ in range(2)]
    forced: list[list[int]] = []
    for step in range(12):
        present = [0, 1] if step else [0]  # row 1 comes a second later
        got = processor(torch.arange(48.0).repeat(len(present), 1), [rows[number] for number in present])
        forced.append([number for number in present if int(got[present.index(number)].argmax()) == THANKS])
        for number in present:
            rows[number]["__req__"].output_ids.append(1)
        clock.now += 1
    # Row 0: 3 seconds after step 0, and 3 seconds after that. Row 1 one step later.
    assert [step for step in range(12) if 0 in forced[step]] == [3, 6]
    assert [step for step in range(12) if 1 in forced[step]] == [4, 7]


@pytest.mark.parametrize(
    "params",
    [
        {"phrase": "a", "trigger_time": 0.5},
        {"phrase": "a", "trigger_token_phrase": "fig", "trigger_time": None, "trigger_count": 0},
        {"phrase": "a", "trigger_token_phrase": "fig", "trigger_after": True},
    ],
)
def test_accepts(params: dict[str, Any], zoo_model: ModelView) -> None:
    TriggerPhraseLogitsProcessor().prepare(params, zoo_model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"trigger_time": 1}, "phrase: missing from custom_params, expected a string"),
        ({"phrase": "a"}, "trigger_token_phrase, trigger_time: one of them is needed, or nothing triggers the phrase"),
        (
            {"phrase": "a", "trigger_token_phrase": "a b"},
            "trigger_token_phrase: expected a string of one token, but 'a b'",
        ),
        (
            {"phrase": "a", "trigger_time": 0},
            "trigger_time: expected a number of seconds greater than 0, or null, got 0",
        ),
        ({"phrase": "a", "trigger_time": 1, "trigger_count": -1}, "trigger_count: expected an integer from 0 to"),
        ({"phrase": "a", "trigger_time": 1, "trigger_after": 1}, "trigger_after: expected true or false, got 1"),
    ],
)
def test_refuses(params: dict[str, Any], message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TriggerPhraseLogitsProcessor().prepare(params, zoo_model)
