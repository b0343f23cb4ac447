"""White space in constrained JSON, for a model that prefers it to anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.engine.async_engine import AsyncEngine

COMPLETIONS, CHAT, RESPONSES, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "boolean"},
        "b": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
JSON_TAG = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ">"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (
        CHAT,
        {**MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "structured_outputs": (COMPLETIONS, {"prompt": "hello", "structured_outputs": {"json": SCHEMA}}),
    "guided_json": (COMPLETIONS, {"prompt": "hello", "guided_json": SCHEMA}),
    "json_schema": (GENERATE, {"text": "hello", "sampling_params": {"json_schema": SCHEMA}}),
    "structural_tag": (
        GENERATE,
        {"text": "hello", "sampling_params": {"structural_tag": json.dumps({"format": JSON_TAG})}},
    ),
    "responses": (
        RESPONSES,
        {"input": "hello", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    "tools": (CHAT, {**MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    "a tool by name": (
        CHAT,
        {**MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
}


@pytest.fixture(scope="module")
def real(make_module_engine: Callable[..., AsyncEngine], make_client: Callable[[AsyncEngine], Any]) -> Any:
    return make_client(make_module_engine(max_num_seqs=8))


@pytest.fixture(scope="module")
def without_space(make_module_engine: Callable[..., AsyncEngine], make_client: Callable[[AsyncEngine], Any]) -> Any:
    return make_client(make_module_engine(max_num_seqs=8, constrained_json_whitespace_pattern=""))


def _answer(client: Any, name: str, character: str, **fields: Any) -> str:
    """Return the text of an answer by a model that prefers one white space character."""
    path, body = BODIES[name]
    ((token, *_),) = [client.ok("/tokenize", {"prompt": character, "add_special_tokens": False})["tokens"]]
    sampling = {"logit_bias": {str(token): 100}, "temperature": 0, **fields}
    if path == GENERATE:
        answer = client.ok(
            path, {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 300, **sampling}}
        )
        return str(answer["text"])
    limit = {"max_output_tokens": 300} if path == RESPONSES else {"max_tokens": 300}
    answer = client.ok(path, {**body, **limit, **sampling})
    if path == RESPONSES:
        return str(answer["output"][-1]["content"][0]["text"])
    (choice,) = answer["choices"]
    if path == COMPLETIONS:
        return str(choice["text"])
    calls = choice["message"].get("tool_calls")
    return str(calls[0]["function"]["arguments"] if calls else choice["message"]["content"])


def _longest_space(text: str) -> int:
    return max((len(run) for run in re.findall(r"[ \t\r\n]+", text)), default=0)


@pytest.mark.parametrize("character", ["\n", " "])
@pytest.mark.parametrize("name", BODIES)
def test_white_space_is_bounded(real: Any, name: str, character: str) -> None:
    text = _answer(real, name, character)
    assert json.loads(text.strip("<>")).keys() == {"a", "b"}
    assert all(re.fullmatch(r"(\n[ \t]{0,20})? ?", run) for run in re.findall(r"[ \t\r\n]+", text)), text


@pytest.mark.parametrize("name", BODIES)
def test_a_request_sets_the_white_space(real: Any, name: str) -> None:
    assert _longest_space(_answer(real, name, " ", whitespace_pattern="")) == 0
    assert _longest_space(_answer(real, name, " ", whitespace_pattern="[ ]{0,3}")) == 3


@pytest.mark.parametrize("name", BODIES)
def test_the_operator_sets_the_white_space(without_space: Any, name: str) -> None:
    assert _longest_space(_answer(without_space, name, " ")) == 0
    assert _longest_space(_answer(without_space, name, " ", whitespace_pattern="[ ]{0,3}")) == 3


@pytest.mark.parametrize("text", ['{"a": true, "b": [1, 1]}', '{"a":true,"b":[1,1]}', "indented"])
def test_usual_json_is_allowed(real: Any, text: str) -> None:
    text = json.dumps({"a": True, "b": [1, 1]}, indent=4) if text == "indented" else text
    body = {"prompt": "hello", "guided_json": SCHEMA, "max_tokens": 200, "temperature": 0}
    only = {"processor": {"name": "grammar"}, "params": {"choice": [text]}}
    assert real.ok(COMPLETIONS, {**body, "logits_processors": [only]})["choices"][0]["text"] == text


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "hello", "guided_regex": "a"}, "whitespace_pattern", "requires JSON, but guided_regex is"),
    (COMPLETIONS, {"prompt": "hello"}, "whitespace_pattern", "requires a constraint to JSON, such as json_schema"),
    (CHAT, {**MESSAGES, "tools": [TOOL], "tool_choice": "none"}, "whitespace_pattern", "requires a constraint to JSON"),
    (
        COMPLETIONS,
        {"prompt": "hello", "structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "whitespace_pattern",
        "is set there too: leave one out",
    ),
    (GENERATE, {"text": "hello"}, "sampling_params.whitespace_pattern", "requires a constraint to JSON"),
    (
        COMPLETIONS,
        {"prompt": "hello", "guided_json": {}, "whitespace_pattern": "("},
        "guided_json",
        "whitespace_pattern cannot be used: unclosed group: (",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), REFUSED, ids=range(len(REFUSED)))
def test_white_space_without_json_is_refused(real: Any, path: str, body: dict[str, Any], param: str, says: str) -> None:
    if path == GENERATE:
        body = {**body, "sampling_params": {"whitespace_pattern": ""}}
    else:
        body = {"whitespace_pattern": "", **body}
    answer = real.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
