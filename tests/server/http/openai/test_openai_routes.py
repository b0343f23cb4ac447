from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.answers import error_of

URL = "/v1/completions"


def test_one_prompt(client: Any) -> None:
    answer = client.ok(URL, {"model": "tiny", "prompt": "ab", "temperature": 0, "user": "me"})
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "Hi!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize("name", ["tiny", "/models/tiny", "default", None])
def test_model_names(name: str | None, client: Any) -> None:
    assert client.ok(URL, {"model": name, "prompt": "a"})["model"] == "tiny"


def test_default_max_tokens_is_openais(client: Any, engine: Any) -> None:
    client.ok(URL, {"prompt": "a"})
    client.ok(URL, {"prompt": "a" * 60})
    assert [request.sampling_params.max_new_tokens for request in engine.requests] == [16, 4]


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("a", [[97]]), (["a", "b"], [[97], [98]]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_forms_of_the_prompt(prompt: Any, token_ids: list[list[int]], client: Any, engine: Any) -> None:
    answer = client.ok(URL, {"prompt": prompt, "request_id": "r"})
    assert [request.prompt_token_ids for request in engine.requests] == token_ids
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(token_ids)))
    assert answer["id"] == "r"


def test_usage_counts_a_prompt_once(client: Any) -> None:
    answer = client.ok(URL, {"prompt": ["a", "bc"], "n": 2, "best_of": 2})
    assert len(answer["choices"]) == 4
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 16)


def test_parameters_reach_the_engine(client: Any, engine: Any) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 5,
        "min_tokens": 1,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 7,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "vllm_xargs": {"k": 1},
        "custom_params": {"p": 2},
        "custom_logit_processor": {"name": "installed"},
        "logit_bias": {"5": -100},
        "skip_special_tokens": False,
    }
    client.ok(URL, body)
    (request,) = engine.requests
    params = request.sampling_params
    assert (params.max_new_tokens, params.min_new_tokens, params.top_k, params.seed) == (5, 1, 3, 7)
    assert params.stop == ("x", "y")
    assert params.stop_token_ids == {9}
    assert params.include_stop_str_in_output
    assert params.extra_args == {"k": 1}
    assert params.logit_bias == {5: -100}
    assert not params.skip_special_tokens
    assert request.processors[0].params == {"p": 2}


def test_receipts(client: Any) -> None:
    (choice,) = client.ok(URL, {"prompt": "a", "custom_logit_processor": '{"name": "installed"}'})["choices"]
    assert choice["receipts"][0]["steps"] == 4


def test_stop_reason_is_the_requests_stop(client: Any) -> None:
    (choice,) = client.ok(URL, {"prompt": "a", "stop_token_ids": [0]})["choices"]
    assert choice["stop_reason"] == 0
    (choice,) = client.ok(URL, {"prompt": "a", "max_tokens": 1})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_logprobs(client: Any) -> None:
    (choice,) = client.ok(URL, {"prompt": "a", "logprobs": 2, "max_tokens": 2})["choices"]
    assert choice["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5, "I": -1.0}, {"i": -0.5, "j": -1.0}],
        "text_offset": [0, 1],
    }


def test_infinite_logprobs_become_openais_minimum(client: Any, engine: Any) -> None:
    script = engine.script

    def without_hope(request: Any) -> list[Any]:
        chunks = script(request)
        worst = replace(chunks[0].logprobs[0], top=((72, -0.5), (73, float("-inf"))))
        return [replace(chunks[0], logprobs=[worst]), *chunks[1:]]

    engine.script = without_hope
    (choice,) = client.ok(URL, {"prompt": "a", "logprobs": 2, "max_tokens": 2})["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"H": -0.5, "I": -9999.0}


def test_echo_with_logprobs(client: Any) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = client.ok(URL, body)["choices"]
    assert choice["text"] == "abH"
    assert choice["logprobs"]["tokens"] == ["a", "b", "H"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    events = client.events(URL, body)
    assert [event["choices"][0]["text"] for event in events] == ["abH"]
    assert events[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_echo_of_token_ids(client: Any) -> None:
    assert client.ok(URL, {"prompt": [97, 98], "echo": True})["choices"][0]["text"] == "abHi!"


def test_echo_without_output(client: Any) -> None:
    answer = client.ok(URL, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0})
    (choice,) = answer["choices"]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_and_token_ids(client: Any) -> None:
    body = {"prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1}
    (choice,) = client.ok(URL, body)["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == [72]


def test_stream(client: Any) -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}, "logprobs": 0, "return_token_ids": True}
    *events, usage = client.events(URL, body)
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["H", "i", "!", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1], [2], [3]]
    assert choices[0]["prompt_token_ids"] == [97]
    assert "prompt_token_ids" not in choices[1]
    assert all(event["usage"] is None for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5
    assert len({event["id"] for event in [*events, usage]}) == 1


def test_stream_with_usage_in_each_event(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.events(URL, {"prompt": "a", "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]


def test_stream_with_several_continuations(client: Any) -> None:
    events = client.events(URL, {"prompt": ["a", "b"], "n": 2})
    texts = dict.fromkeys(range(4), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == dict.fromkeys(range(4), "Hi!")


def test_fault(client: Any, engine: Any, failing: Any) -> None:
    engine.script = failing
    error = error_of(client.post(URL, {"prompt": "a"}))
    assert error["type"] == "ProcessorFault"
    assert error["traceback"] == "Traceback: 1/0"


def test_fault_in_a_stream(client: Any, engine: Any, failing: Any) -> None:
    engine.script = failing
    first, last = client.events(URL, {"prompt": "a"})
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["type"] == "ProcessorFault"
    assert last["error"]["param"] is None
    assert last["error"]["digest"] == "sha256:" + "0" * 64
    assert len(engine.closed) == 1


CHAT_URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a"}]


def test_response(client: Any, engine: Any) -> None:
    answer = client.ok(CHAT_URL, {"model": "tiny", "messages": HELLO})
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
    client.ok(CHAT_URL, {"messages": messages})
    assert bytes(engine.requests[0].prompt_token_ids) == b"<system>s<user>x\ny<assistant><tool>t<assistant>"


def test_template_options(client: Any, engine: Any) -> None:
    client.ok(CHAT_URL, {"messages": HELLO, "continue_final_message": True})
    client.ok(CHAT_URL, {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"think": 1}})
    prompts = [bytes(request.prompt_token_ids) for request in engine.requests]
    assert prompts == [b"<user>a", b"<user>a|think=1"]


@pytest.mark.parametrize("name", ["tenant", "function"])
def test_template_variable_may_have_any_name(name: str, client: Any) -> None:
    client.ok(CHAT_URL, {"messages": HELLO, "chat_template_kwargs": {name: 1}})


def test_max_tokens_and_max_completion_tokens(client: Any, engine: Any) -> None:
    client.ok(CHAT_URL, {"messages": HELLO, "max_tokens": 3})
    client.ok(CHAT_URL, {"messages": HELLO, "max_completion_tokens": 4})
    client.ok(CHAT_URL, {"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 5})
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
    client.ok(CHAT_URL, body)


def test_chat_logprobs(client: Any) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    (choice,) = client.ok(CHAT_URL, body)["choices"]
    entry = {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert choice["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}
    del body["top_logprobs"]
    (choice,) = client.ok(CHAT_URL, body)["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_chat_prompt_logprobs_and_token_ids(client: Any) -> None:
    body = {"messages": HELLO, "prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 1}
    answer = client.ok(CHAT_URL, body)
    assert answer["prompt_token_ids"] == list(b"<user>a<assistant>")
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {"117": {"logprob": -0.5, "rank": 1, "decoded_token": "u"}}
    assert answer["choices"][0]["token_ids"] == [72]


def test_chat_stream(client: Any) -> None:
    events = client.events(CHAT_URL, {"messages": HELLO, "n": 2, "custom_logit_processor": {"name": "installed"}})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    of_second = [event["choices"][0] for event in events if event["choices"][0]["index"] == 1]
    assert of_second[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in of_second[1:]] == [{"content": text} for text in ("H", "i", "!", "")]
    assert [choice["finish_reason"] for choice in of_second] == [None, None, None, None, "stop"]
    assert of_second[-1]["receipts"][0]["name"] == "Mine"


def test_usage_at_the_end_of_a_stream(client: Any) -> None:
    *_, last = client.events(CHAT_URL, {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_several_processors(client: Any, engine: Any) -> None:
    client.ok(CHAT_URL, {"messages": HELLO, "custom_logit_processor": [{"name": "x"}, {"name": "y"}]})
    assert [processor.string.name for processor in engine.requests[0].processors] == ["x", "y"]
