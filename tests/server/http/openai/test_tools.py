"""Tools through HTTP: the prompt, the constraint on the output, and calls in responses and streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from logitship.server.config import ServerConfig

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds."}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [WEATHER, ADD], **fields}


@pytest.fixture
def engine(make_long_engine: Callable[..., Any]) -> Any:
    return make_long_engine()


@pytest.fixture
def make_long_engine(make_fake_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Creates engines with enough space for tools in the prompt."""

    def make(**settings: Any) -> Any:
        engine = make_fake_engine(**settings)
        engine.model = replace(engine.model, max_model_len=1024)
        return engine

    return make


@pytest.fixture
def says(engine: Any, text_script: Any) -> Callable[[str], None]:
    """Sets the output of the model."""

    def script(text: str) -> None:
        engine.script = text_script(text)

    return script


def test_calls_in_a_response(client: Any, says: Any) -> None:
    says(f"I look.\n{CALL}\n{CALL}")
    [choice] = client.ok(PATH, chat())["choices"]
    first, second = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "I look.\n"
    assert choice["finish_reason"] == "tool_calls"
    assert (first["type"], first["function"], second["function"]) == ("function", CALLED, CALLED)
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    [choice] = client.ok(PATH, chat(parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_calls_in_a_stream(client: Any, says: Any) -> None:
    says(f"I look.\n{CALL}")
    choices = [event["choices"][0] for event in client.events(PATH, chat())]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look.\n"
    first, *others = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert {tuple(call) for call in others} == {("index", "function")}
    assert "".join(call["function"]["arguments"] for call in (first, *others)) == CALLED["arguments"]
    assert len(others) > 3
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def test_answer_without_calls(client: Any, says: Any) -> None:
    says("No <tool")
    [choice] = client.ok(PATH, chat())["choices"]
    assert choice["message"] == {"role": "assistant", "content": "No <tool", "refusal": None}
    assert choice["finish_reason"] == "stop"
    deltas = [event["choices"][0]["delta"] for event in client.events(PATH, chat())]
    assert "".join(delta.get("content", "") for delta in deltas) == "No <tool"


def test_none_is_as_without_tools(client: Any, engine: Any, says: Any) -> None:
    says(CALL)
    [choice] = client.ok(PATH, chat(tool_choice="none"))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert bytes(engine.requests[0].prompt_token_ids) == b"<user>a<assistant>"
    assert engine.requests[0].sampling_params.skip_special_tokens
    assert client.post(PATH, {"messages": [USER], "tool_choice": "auto"}).status_code == 200


def test_conversation_with_calls(client: Any, engine: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": CALLED}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    client.ok(PATH, {"messages": messages})
    assert bytes(engine.requests[0].prompt_token_ids) == b"<user>a<assistant><tool>sunny<assistant>"
    seen = engine.tokenizer.messages[1]
    assert seen["tool_calls"] == [{**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]


def test_template_gets_the_tools(client: Any, engine: Any) -> None:
    client.ok(PATH, chat())
    shown = [
        {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}},
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    prompt = f"<user>a|tools={shown}<assistant>".encode()
    assert bytes(engine.requests[0].prompt_token_ids) == prompt
    assert not engine.requests[0].sampling_params.skip_special_tokens
    client.ok(PATH, chat(skip_special_tokens=True))
    assert engine.requests[1].sampling_params.skip_special_tokens
    assert bytes(client.ok("/tokenize", chat())["tokens"]) == prompt


def tag_of(engine: Any) -> Any:
    [processor] = engine.requests[-1].processors
    return processor.params["structural_tag"]["format"]


def test_constraints(client: Any, engine: Any) -> None:
    client.ok(PATH, chat())
    assert engine.requests[-1].processors == ()
    client.ok(PATH, chat(tool_choice="required"))
    assert (tag_of(engine)["type"], tag_of(engine)["stop_after_first"]) == ("tags_with_separator", False)
    assert [tag["begin"] for tag in tag_of(engine)["tags"]] == [
        '<tool_call>\n{"name": "weather", "arguments": ',
        '<tool_call>\n{"name": "add", "arguments": ',
    ]
    client.ok(PATH, chat(tool_choice=NAMED))
    [tag] = tag_of(engine)["tags"]
    assert tag["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert tag_of(engine)["stop_after_first"]
    strict = {"type": "function", "function": {"name": "strict", "parameters": SCHEMA, "strict": True}}
    client.ok(PATH, chat(tools=[WEATHER, strict], parallel_tool_calls=False))
    assert (tag_of(engine)["type"], tag_of(engine)["stop_after_first"]) == ("triggered_tags", True)
    assert [tag["content"]["json_schema"] for tag in tag_of(engine)["tags"]] == [{"type": "object"}, SCHEMA]


def test_named_function_keeps_the_finish_reason(client: Any, says: Any) -> None:
    says(CALL)
    [choice] = client.ok(PATH, chat(tool_choice=NAMED))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert choice["message"]["tool_calls"][0]["function"] == CALLED


def test_formats(make_client: Any, make_long_engine: Any, text_script: Any) -> None:
    engine = make_long_engine(tool_call_parser="llama3_json")
    engine.script = text_script('{"name": "weather", "parameters": {"city": "Oslo"}}')
    client = make_client(engine)
    for choice in ("auto", "required", NAMED):
        [answer] = client.ok(PATH, chat(tool_choice=choice))["choices"]
        assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    client.http.close()


def test_templates_without_tools(make_client: Any, make_long_engine: Any, text_script: Any) -> None:
    engine = make_long_engine()
    engine.tokenizer.template_uses = lambda variable: False
    engine.script = text_script('[{"name": "weather", "parameters": {"city": "Oslo"}}]')
    client = make_client(engine)
    [choice] = client.ok(PATH, chat(tool_choice="required"))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    error = client.post(PATH, chat()).json()["error"]
    assert (error["param"], "does not support tools" in error["message"]) == ("tools", True)
    engine.tokenizer.template_uses = lambda variable: True
    engine.tokenizer.template_contains = lambda text: False
    error = client.post(PATH, chat()).json()["error"]
    assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)
    client.http.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{**WEATHER, "x": 1}]}, "tools[0].x"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{**USER, "tool_calls": [{"function": CALLED}]}]}, "messages[0].tool_calls"),
        ({"tools": [{**WEATHER, "function": {"name": "a", "description": "x" * 9000}}]}, "tools"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str, client: Any) -> None:
    answer = client.post(PATH, chat(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value  # type: ignore[no-any-return]


def called_with(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "a", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def defined_with(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "a", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": "some"}, "tool_choice", 'must be "none", "auto", "required", or an object'),
        ({"tool_choice": 5}, "tool_choice", 'must be "none", "auto", "required", or an object'),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "is missing"),
        ({"tool_choice": {**NAMED, "x": 1}}, "tool_choice.x", "unknown field"),
        (called_with(5), "messages[1].tool_calls[0].function.arguments", "must be a JSON object, or its JSON text"),
        (called_with("x" * ((1 << 20) + 1)), "messages[1].tool_calls[0].function.arguments", "at most 1048576"),
    ],
)
def test_refusal_of_a_field_of_several_types(
    fields: dict[str, Any], param: str, says: str, make_client: Any, make_long_engine: Any
) -> None:
    client = make_client(make_long_engine(max_request_bytes=1 << 22))
    error = client.post(PATH, chat(**fields)).json()["error"]
    client.http.close()
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (called_with(nested(101)), "messages[1].tool_calls[0].function.arguments"),
        (defined_with(nested(101)), "tools[0].function.parameters"),
    ],
)
def test_deep_nesting_is_refused(fields: dict[str, Any], param: str, client: Any) -> None:
    answer = client.post(PATH, chat(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "is nested deeper than 100 levels" in answer.json()["error"]["message"]


def test_nesting_at_the_bound_is_accepted(client: Any) -> None:
    client.ok(PATH, chat(**called_with(nested(100))))
    client.ok(PATH, chat(**called_with(json.dumps(nested(100)))))
    client.ok(PATH, chat(**defined_with(nested(100))))


ELEMENTS = '{"a":[' + "[]," * 20000 + "1]}"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ("", {}),
        ('{"city": "Par', None),
        ("[1]", None),
        ('{"a": "\\ud800"}', None),
        (json.dumps(nested(101)), None),
        ('{"a":' * 2000, None),
        (ELEMENTS, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_that_are_no_object_are_passed_on_as_text(text: str, seen: Any, client: Any, engine: Any) -> None:
    """An answer that was cut off has such arguments. They are not decoded, whatever the model wrote."""
    engine.model = replace(engine.model, max_model_len=1 << 20)
    client.ok(PATH, chat(**called_with(text)))
    [call] = engine.tokenizer.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == (text if seen is None else seen)


def test_names_of_the_peers_parsers() -> None:
    for name in ("hermes", "qwen", "qwen25", "llama3", "llama3_json"):
        assert ServerConfig(tool_call_parser=name).tool_call_parser == name  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@pytest.mark.parametrize("length", [3, 20, 45, len(CALL) - 3])
def test_call_that_is_cut_off_is_no_text(choice: Any, length: int, client: Any, says: Any) -> None:
    says(CALL[:length])
    [whole] = client.ok(PATH, chat(tool_choice=choice))["choices"]
    deltas = [event["choices"][0]["delta"] for event in client.events(PATH, chat(tool_choice=choice))]
    assert not whole["message"]["content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    answer = {"role": "assistant", **{key: whole["message"].get(key) for key in ("content", "tool_calls")}}
    client.ok(PATH, chat(messages=[USER, {key: value for key, value in answer.items() if value is not None}]))
