"""`thinking_token_budget` and its aliases, from the body to the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.answers import error_of

CONFIG = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
PROMPT = "<think>hello"
"""Gives five reasoning tokens on the tiny model."""

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
FIELD = "thinking_token_budget"


def bodies(budget: Any) -> list[Any]:
    """Every alias: path, body, and the field name in refusals."""
    messages = [{"role": "user", "content": "a"}]
    return [
        (GENERATE, {"text": "a", "sampling_params": {FIELD: budget}}, f"sampling_params.{FIELD}"),
        (GENERATE, {"text": "a", "max_thinking_tokens": budget}, "max_thinking_tokens"),
        (COMPLETIONS, {"prompt": "a", FIELD: budget}, FIELD),
        (CHAT, {"messages": messages, FIELD: budget}, FIELD),
    ]


@pytest.mark.parametrize(("path", "body", "_"), bodies(7))
def test_budget_reaches_the_engine(
    make_client: Callable[..., Any], make_fake_engine: Callable[..., Any], path: str, body: Any, _: str
) -> None:
    engine = make_fake_engine(reasoning_config=CONFIG)
    make_client(engine).ok(path, body)
    assert engine.requests[0].sampling_params.thinking_token_budget == 7


@pytest.mark.parametrize(("path", "body", "_"), [*bodies(-1), *bodies(None)])
def test_no_limit_needs_no_reasoning_config(client: Any, engine: Any, path: str, body: Any, _: str) -> None:
    client.ok(path, body)
    assert engine.requests[0].sampling_params.thinking_token_budget is None


@pytest.mark.parametrize(("path", "body", "name"), bodies(7))
def test_budget_requires_reasoning_config(client: Any, path: str, body: Any, name: str) -> None:
    error = error_of(client.post(path, body))
    assert error["message"].startswith(f"{name}: this server does not know the model's thinking markers")
    assert "--reasoning-config" in error["message"]
    assert error["param"] == name


@pytest.mark.parametrize(("path", "body", "name"), [case for bad in (-2, 1.0, True, "5") for case in bodies(bad)])
def test_invalid_budgets(client: Any, path: str, body: Any, name: str) -> None:
    assert error_of(client.post(path, body))["param"] == name


def test_contradicting_budgets(make_client: Callable[..., Any], make_fake_engine: Callable[..., Any]) -> None:
    client = make_client(make_fake_engine(reasoning_config=CONFIG))
    body = {"text": "a", "sampling_params": {FIELD: 5}, "max_thinking_tokens": 5}
    client.ok(GENERATE, body)
    error = error_of(client.post(GENERATE, body | {"max_thinking_tokens": 6}))
    assert error["message"].startswith("max_thinking_tokens: differs from thinking_token_budget")


def test_budget_on_the_real_engine(make_engine: Callable[..., Any], make_client: Callable[..., Any]) -> None:
    client = make_client(make_engine(reasoning_config=CONFIG))
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    (plain,) = client.ok(COMPLETIONS, {**body, "return_token_ids": True})["choices"]
    (ended,) = client.ok(COMPLETIONS, {**body, "return_token_ids": True, FIELD: 8})["choices"]
    assert ended["token_ids"][:4] == [*plain["token_ids"][:3], 3]
    assert "</think>" in ended["text"]
    sampling = {"max_new_tokens": 1, "temperature": 0, "skip_special_tokens": False}
    answers = client.ok(
        GENERATE,
        {"text": [PROMPT, PROMPT], "sampling_params": [{**sampling, FIELD: 0}, {**sampling, FIELD: 100}]},
    )
    assert answers[0]["text"] == "</think>"
    assert answers[1]["text"] != "</think>"
