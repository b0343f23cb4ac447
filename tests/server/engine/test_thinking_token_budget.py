"""Thinking budgets through the whole engine, on the tiny model: token 2 is <think>, token 3 is </think>."""

from __future__ import annotations

from typing import Any

import pytest

from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import (
    GenerationRequest,
)
from tests.helpers.coroutines import run
from tests.helpers.engine_requests import BuildEngine, byte_tokens, generate, generate_together, installed, request
from tests.helpers.processors import shipped

THINK, END = 2, 3
CONFIG = {"reasoning_parser": "qwen3"}

HELLO = byte_tokens("hello")
OVERRULE = shipped("Overrule", "logits[:, custom_param_list[0]['token']] = -torch.inf\nreturn logits")


def thinking(rid: str, budget: int | None, **fields: Any) -> GenerationRequest:
    """Return a request whose prompt starts to think."""
    defaults: dict[str, Any] = {
        "prompt": [THINK, *HELLO],
        "temperature": 0.0,
        "max_tokens": 12,
        "thinking_token_budget": budget,
    }
    return request(rid, **(defaults | fields))


def test_rows_with_and_without_budgets(make_engine: BuildEngine) -> None:
    engine = make_engine(reasoning_config=CONFIG, max_num_seqs=8)
    wanted = [
        thinking("plain", None),
        thinking("unlimited", -1),
        thinking("none left", 4),
        thinking("seven", 7),
        thinking("answering", 0, prompt=HELLO),
        thinking("random", 6, temperature=1.0, seed=5),
    ]
    outputs = run(generate_together(engine, wanted))
    plain, unlimited, none_left, seven, answering, random = (output.token_ids for output in outputs)
    assert END not in plain
    assert unlimited == plain
    assert none_left[0] == END
    assert (seven[:2], seven[2]) == (plain[:2], END)
    assert (random[1], len(random)) == (END, 12)
    assert END not in answering
    assert run(generate(make_engine(), thinking("alone", None))).token_ids == plain


def test_end_marker_of_several_tokens(make_engine: BuildEngine) -> None:
    engine = make_engine(reasoning_config={**CONFIG, "reasoning_end_str": "So.</think>"})
    tokens = run(generate(engine, thinking("a", 5))).token_ids
    assert tokens[:4] == [*engine.tokenizer.encode("So."), END]


@pytest.mark.parametrize(
    ("fields", "involved"),
    [
        ({"processors": [installed("disallowed_tokens", token_ids=[END])]}, "disallowed_tokens"),
        ({"processors": [(OVERRULE, {"token": END})]}, "Overrule"),
        ({"allowed_token_ids": HELLO}, "allowed_token_ids"),
    ],
)
def test_error_names_what_masks_the_end_marker(make_engine: BuildEngine, fields: dict[str, Any], involved: str) -> None:
    engine = make_engine(reasoning_config=CONFIG)
    stopped, other = run(generate_together(engine, [thinking("a", 7, **fields), thinking("b", 7)]))
    assert len(stopped.token_ids) == 2
    error = stopped.error
    assert involved in error.message
    assert "thinking_token_budget" in error.message
    assert len(other.token_ids) == 12


def test_budget_is_refused_without_reasoning_config(make_engine: BuildEngine) -> None:
    engine = make_engine()
    with pytest.raises(BadRequest, match=r"start it with --reasoning-config '\{\"reasoning_start_str\"") as refused:
        run(generate(engine, thinking("a", 7)))
    assert refused.value.param == "thinking_token_budget"
    assert len(run(generate(engine, thinking("b", -1))).token_ids) == 12
