"""Streams while text is held back: a stop string or a character may be about to be completed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from logitship.server.requests.messages import FinishReason, GenerationChunk, GenerationRequest, TokenLogprobs

PIECES = ["", "", "He", "", "llo", "", ""]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture
def holding(engine: Any) -> None:
    def script(request: GenerationRequest) -> list[GenerationChunk]:
        wants_logprobs = request.sampling_params.logprobs is not None
        return [
            GenerationChunk(
                index=index,
                text=text,
                token_ids=[97 + place],
                logprobs=[TokenLogprobs(97 + place, -1.0, 1)] if wants_logprobs else [],
                finish_reason=FinishReason("stop", 0) if place == len(PIECES) - 1 else None,
                prompt_tokens=1,
                completion_tokens=place + 1,
            )
            for place, text in enumerate(PIECES)
            for index in range(request.num_sequences)
        ]

    engine.script = script


def _choices(client: Any, path: str, **fields: Any) -> list[Any]:
    events = client.events(path, {**ROUTES[path], "stream": True, **fields})
    return [choice for event in events for choice in event.get("choices", ())]


@pytest.mark.usefixtures("holding")
def test_a_stream_has_no_empty_deltas(client: Any) -> None:
    texts = [choice["text"] for choice in _choices(client, "/v1/completions")]
    assert texts == ["He", "llo", ""]  # the last one has the finish reason
    deltas = [choice["delta"] for choice in _choices(client, "/v1/chat/completions")]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]


@pytest.mark.usefixtures("holding")
def test_each_choice_begins_with_its_role(client: Any) -> None:
    choices = _choices(client, "/v1/chat/completions", n=2)
    for index in (0, 1):
        mine = [choice["delta"] for choice in choices if choice["index"] == index]
        assert [delta.get("role") for delta in mine] == ["assistant", None, None, None]


@pytest.mark.usefixtures("holding")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_known_of_a_held_token_is_sent(client: Any, path: str) -> None:
    with_ids = _choices(client, path, return_token_ids=True)
    assert [number for choice in with_ids for number in choice.get("token_ids", ())] == list(range(97, 104))
    wants: dict[str, Any] = {"logprobs": 0} if path == "/v1/completions" else {"logprobs": True}
    logprobs = [choice["logprobs"] for choice in _choices(client, path, **wants) if choice["logprobs"]]
    assert len(logprobs) == len(PIECES)


@pytest.mark.usefixtures("holding")
def test_usage_is_counted_in_each_event(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events("/v1/completions", {"prompt": "a", "stream": True, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [3, 5, 7, 7]


def test_a_call_that_is_parsed_sends_no_empty_deltas(
    make_fake_engine: Callable[..., Any], make_client: Callable[[Any], Any], text_script: Callable[[str], Any]
) -> None:
    engine = make_fake_engine()
    engine.model = replace(engine.model, max_model_len=1024)
    engine.script = text_script('[{"name": "f", "parameters": {"a": 1}}]')
    tool = {"type": "function", "function": {"name": "f"}}
    choices = _choices(make_client(engine), "/v1/chat/completions", tools=[tool], tool_choice="required", max_tokens=60)
    assert len(choices) > 3
    assert [choice["delta"] for choice in choices[1:-1] if not any(choice["delta"].values())] == []
