from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.requests.messages import FinishReason, GenerationChunk, GenerationRequest, TokenLogprobs
from tests.helpers.answers import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOGPROBS = [-3.0, -1.0, -2.0, -0.5]
"""Log-probability per token of continuations 0, 1, …; the text identifies the continuation."""


def graded(request: GenerationRequest) -> list[GenerationChunk]:
    """Script in which continuation i is the i-th letter, i + 1 times."""
    return [
        GenerationChunk(
            index=index,
            text="abcd"[index] * (index + 1),
            token_ids=[ord("abcd"[index])] * (index + 1),
            logprobs=[TokenLogprobs(ord("abcd"[index]), LOGPROBS[index], 1)] * (index + 1),
            finish_reason=FinishReason("length"),
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0 if index == 0 else len(request.prompt_token_ids) - 1,
            completion_tokens=index + 1,
        )
        for index in range(request.num_sequences)
    ]


def test_best_first(client: Any, engine: Any) -> None:
    engine.script = graded
    answer = client.ok(COMPLETIONS, {"prompt": ["xyz", "yz"], "n": 2, "best_of": 4})
    assert [choice["text"] for choice in answer["choices"]] == ["dddd", "bb"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 20,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [(request.n, request.best_of) for request in engine.requests] == [(2, 4)] * 2


def test_details_belong_to_the_returned_choices(client: Any, engine: Any) -> None:
    engine.script = graded
    body = {"prompt": "xyz", "best_of": 3, "logprobs": 0, "echo": True, "return_token_ids": True}
    (choice,) = client.ok(COMPLETIONS, body)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("xyzbb", [98, 98])
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.0]
    assert choice["prompt_token_ids"] == [120, 121, 122]


def test_chat_template(client: Any, engine: Any) -> None:
    engine.script = graded
    answer = client.ok(CHAT, {"messages": [{"role": "user", "content": "x"}], "best_of": 4, "n": 3})
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["dddd", "bb", "ccc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@pytest.mark.parametrize("body", [{"n": 2, "best_of": 2}, {"n": 2}])
def test_best_of_equal_to_n_keeps_the_order(client: Any, engine: Any, body: dict[str, Any]) -> None:
    engine.script = graded
    answer = client.ok(COMPLETIONS, {"prompt": "x", **body})
    assert [choice["text"] for choice in answer["choices"]] == ["a", "bb"]
    streamed = client.events(COMPLETIONS, {"prompt": "x", **body})
    assert [event["choices"][0]["text"] for event in streamed] == ["a", "bb"]


def test_fault_of_any_continuation_fails_the_request(client: Any, engine: Any, failing: Any) -> None:
    engine.script = failing
    assert error_of(client.post(COMPLETIONS, {"prompt": "x", "best_of": 3}))["type"] == "ProcessorFault"


def test_engine_returns_the_best_of_n(make_engine: Callable[..., Any], make_client: Callable[[Any], Any]) -> None:
    client = make_client(make_engine(max_num_seqs=3))
    body = {"prompt": "hello", "seed": 4, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    every = client.ok(COMPLETIONS, {**body, "n": 6, "logprobs": 0})["choices"]
    best = client.ok(COMPLETIONS, {**body, "n": 2, "best_of": 6})["choices"]
    every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["token_ids"] for choice in best] == [choice["token_ids"] for choice in every[:2]]
