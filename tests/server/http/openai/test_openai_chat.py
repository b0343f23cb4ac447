from __future__ import annotations

from typing import Any

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a"}]


def test_response(client: Any, engine: Any) -> None:
    answer = client.ok(URL, {"model": "tiny", "messages": HELLO})
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!", "refusal": None},
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": None,
        }
    ]
    assert engine.requests[0].prompt_token_ids == list(b"<user>a<assistant>")
    assert engine.requests[0].sampling_params.max_new_tokens is None


def test_conversation(client: Any, engine: Any) -> None:
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    client.ok(URL, {"messages": messages})
    assert bytes(engine.requests[0].prompt_token_ids) == b"<system>s<user>x\ny<assistant><tool>t<assistant>"


def test_template_options(client: Any, engine: Any) -> None:
    client.ok(URL, {"messages": HELLO, "continue_final_message": True})
    client.ok(URL, {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"think": 1}})
    prompts = [bytes(request.prompt_token_ids) for request in engine.requests]
    assert prompts == [b"<user>a", b"<user>a|think=1"]


def test_max_tokens_and_max_completion_tokens(client: Any, engine: Any) -> None:
    client.ok(URL, {"messages": HELLO, "max_tokens": 3})
    client.ok(URL, {"messages": HELLO, "max_completion_tokens": 4})
    client.ok(URL, {"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 5})
    assert [request.sampling_params.max_new_tokens for request in engine.requests] == [3, 4, 5]


def test_noop_values_of_unsupported_fields(client: Any) -> None:
    body = {
        "messages": HELLO,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "user": "me",
    }
    client.ok(URL, body)


def test_logprobs(client: Any) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    (choice,) = client.ok(URL, body)["choices"]
    entry = {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert choice["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}
    del body["top_logprobs"]
    (choice,) = client.ok(URL, body)["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_and_token_ids(client: Any) -> None:
    body = {"messages": HELLO, "prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 1}
    answer = client.ok(URL, body)
    assert answer["prompt_token_ids"] == list(b"<user>a<assistant>")
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {"117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    assert answer["choices"][0]["token_ids"] == [72]


def test_stream(client: Any) -> None:
    events = client.events(URL, {"messages": HELLO, "n": 2, "custom_logit_processor": {"name": "installed"}})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    of_second = [event["choices"][0] for event in events if event["choices"][0]["index"] == 1]
    assert of_second[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in of_second[1:]] == [{"content": text} for text in ("H", "i", "!", "")]
    assert [choice["finish_reason"] for choice in of_second] == [None, None, None, None, "stop"]
    assert of_second[-1]["receipts"][0]["name"] == "Mine"


def test_usage_at_the_end_of_a_stream(client: Any) -> None:
    *_, last = client.events(URL, {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_several_processors(client: Any, engine: Any) -> None:
    client.ok(URL, {"messages": HELLO, "custom_logit_processor": [{"name": "x"}, {"name": "y"}]})
    assert [processor.string.name for processor in engine.requests[0].processors] == ["x", "y"]
