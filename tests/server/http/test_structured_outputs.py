"""Every structured output field, through the app, with the real engine on the tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.engine.async_engine import AsyncEngine
from tests.helpers.answers import error_of

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "a" inner "b"\ninner ::= "c" | "d"{2}'
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    GENERATE: {"text": "hello"},
}


@pytest.fixture(scope="module")
def real(make_module_engine: Callable[..., AsyncEngine], make_client: Callable[[AsyncEngine], Any]) -> Any:
    return make_client(make_module_engine(max_num_seqs=8))


def _person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and value["name"] in ("Ann", "Bob") and 1 <= value["age"] <= 99


def _matches(regex: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(regex, text) is not None


def _call(text: str) -> bool:
    return text.startswith("<f=1>") and text.endswith("</f>") and _person(text[5:-4])


JSON_TEXT = json.dumps(SCHEMA)
TAG = {"begin": "<f=1>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
CALL = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [TAG],
    "at_least_one": True,
    "stop_after_first": True,
}
LEGACY = {"structures": [{"begin": "<f=1>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
OPENAI_FIELDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
        _person,
    ),
    ({"json_schema": JSON_TEXT}, _person),
    ({"regex": "(ab|c){2,3}"}, _matches("(ab|c){2,3}")),
    ({"ebnf": EBNF}, _matches("acb|addb")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, _person),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, _person),
    ({"structured_outputs": {"regex": "[ab]{4}", "choice": None}}, _matches("[ab]{4}")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, _matches("yes|no")),
    ({"structured_outputs": {"grammar": EBNF}}, _matches("acb|addb")),
    ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, _matches("x|yy")),
    ({"structured_outputs": {"structural_tag": json.dumps({"format": CALL})}}, _call),
    ({"response_format": {"type": "structural_tag", "format": CALL}}, _call),
    ({"guided_json": SCHEMA}, _person),
    ({"guided_regex": "[ab]{4}"}, _matches("[ab]{4}")),
    ({"guided_choice": ["yes", "no"]}, _matches("yes|no")),
    ({"guided_grammar": EBNF}, _matches("acb|addb")),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "fits"), OPENAI_FIELDS, ids=[str(fields)[:60] for fields, _ in OPENAI_FIELDS])
def test_openai_routes(real: Any, path: str, fields: dict[str, Any], fits: Callable[[str], bool]) -> None:
    (choice,) = real.ok(path, {**PROMPTS[path], **fields, "max_tokens": 400, "seed": 0})["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert choice["finish_reason"] == "stop", text
    assert fits(text), text
    assert [receipt["name"] for receipt in choice["receipts"]] == ["grammar"]


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"json_schema": JSON_TEXT}, _person),
        ({"json_schema": SCHEMA}, _person),
        ({"regex": "(ab|c){2,3}"}, _matches("(ab|c){2,3}")),
        ({"ebnf": EBNF}, _matches("acb|addb")),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": CALL})}, _call),
    ],
    ids=["json_schema text", "json_schema", "regex", "ebnf", "structural_tag"],
)
def test_generate(real: Any, fields: dict[str, Any], fits: Callable[[str], bool]) -> None:
    answer = real.ok(GENERATE, {**PROMPTS[GENERATE], "sampling_params": {**fields, "max_new_tokens": 400}})
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert fits(answer["text"]), answer["text"]
    assert [receipt["name"] for receipt in answer["meta_info"]["receipts"]] == ["grammar"]


def test_legacy_structural_tags(real: Any) -> None:
    """In this grammar the text starts and ends with the tag."""
    only = {"processor": {"name": "grammar"}, "params": {"regex": "<f=[^>]*>[^>]*>"}}
    fields = {"response_format": {"type": "structural_tag", **LEGACY}, "logits_processors": [only]}
    (choice,) = real.ok(COMPLETIONS, {**PROMPTS[COMPLETIONS], **fields, "max_tokens": 400, "seed": 0})["choices"]
    assert choice["finish_reason"] == "stop"
    assert _call(choice["text"]), choice["text"]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}], ids=str
)
def test_json_object(real: Any, fields: dict[str, Any]) -> None:
    (choice,) = real.ok(COMPLETIONS, {**PROMPTS[COMPLETIONS], **fields, "max_tokens": 12})["choices"]
    assert choice["text"].lstrip(" \n\r\t").startswith("{") or not choice["text"].strip(" \n\r\t")


def test_each_continuation_has_its_own_matcher(real: Any) -> None:
    body = {**PROMPTS[COMPLETIONS], "guided_regex": "[a-c]{6}", "n": 6, "seed": 1, "max_tokens": 20}
    texts = [choice["text"] for choice in real.ok(COMPLETIONS, body)["choices"]]
    assert all(re.fullmatch("[a-c]{6}", text) for text in texts), texts
    assert len(set(texts)) > 1


def test_constraint_per_prompt(real: Any) -> None:
    sampling = [{"regex": "aa"}, {"ebnf": 'root ::= "bb"'}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = real.ok(GENERATE, {"text": ["x", "y", "z"], "sampling_params": sampling})
    assert [answer["text"] for answer in answers[:2]] == ["aa", "bb"]
    assert "receipts" not in answers[2]["meta_info"] or not answers[2]["meta_info"]["receipts"]


def test_streamed_output(real: Any) -> None:
    events = real.events(CHAT, {**PROMPTS[CHAT], "guided_choice": ["yes", "no"], "max_tokens": 9})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) in ("yes", "no")


def test_constraint_runs_first(real: Any) -> None:
    body = {
        **PROMPTS[COMPLETIONS],
        "guided_regex": "[ab]{5}",
        "custom_logit_processor": {"name": "disallowed_tokens"},
        "custom_params": {"token_ids": [_token(real, "a")]},
        "max_tokens": 9,
    }
    (choice,) = real.ok(COMPLETIONS, body)["choices"]
    assert choice["text"] == "bbbbb"
    assert [receipt["name"] for receipt in choice["receipts"]] == ["grammar", "disallowed_tokens"]


def _token(real: Any, letter: str) -> int:
    body = {**PROMPTS[COMPLETIONS], "guided_choice": [letter], "return_token_ids": True, "max_tokens": 1}
    return int(real.ok(COMPLETIONS, body)["choices"][0]["token_ids"][0])


def test_error_names_the_processor_that_forbids_everything(real: Any) -> None:
    body = {
        **PROMPTS[COMPLETIONS],
        "guided_regex": "a",
        "logits_processors": [
            {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [_token(real, "a")]}}
        ],
    }
    error = real.post(COMPLETIONS, body).json()["error"]
    assert "grammar, disallowed_tokens forbid the whole vocabulary" in error["message"]


X = {"content": {"type": "regex", "pattern": "(ab|c){5}"}}
DEEP = json.loads('{"type":"star","content":' * 150 + '{"type":"any_text"}' + "}" * 150)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": {"type": "json_scheme"}}, "response_format.type", "'json_schema'"),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": {}}},
        "response_format",
        "the structural tag cannot be used: format: expected a format",
    ),
    (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format", "takes either format, or structures"),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": CALL, "triggers": ["x"]}},
        "response_format",
        "takes either format, or structures",
    ),
    (CHAT, {"response_format": {"type": "text", "format": CALL}}, "response_format.format", "requires type"),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": [CALL]}},
        "response_format.format",
        "must be an object",
    ),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", **LEGACY, "triggers": ["<g"]}},
        "response_format",
        "the tag that begins with '<f=1>' has 0 triggers",
    ),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": {"type": "any_tokens"}}},
        "response_format",
        "the format 'any_tokens' is not supported",
    ),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a" * 300_000}}},
        "response_format",
        "more than 262144",
    ),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": {"type": "repeat", "min": 1, "max": 10**15, **X}}},
        "response_format",
        "cannot be used",
    ),
    (
        CHAT,
        {"response_format": {"type": "structural_tag", "format": DEEP}},
        "response_format",
        "nested deeper than 100",
    ),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required with"),
    (
        CHAT,
        {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
        "response_format.json_schema",
        "only allowed with",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "is missing",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        "response_format.json_schema.schema",
        "the JSON schema cannot be used: uniqueItems cannot be enforced",
    ),
    (CHAT, {"response_format": "json"}, "response_format", "must be a JSON object"),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "response_format",
        "only one constraint, and regex",
    ),
    (
        COMPLETIONS,
        {"guided_json": {}, "guided_regex": "a"},
        "guided_regex",
        "only one constraint, and guided_json is set too",
    ),
    (COMPLETIONS, {"guided_json": "{"}, "guided_json", "the JSON schema cannot be used"),
    (COMPLETIONS, {"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    (COMPLETIONS, {"guided_choice": []}, "guided_choice", "it is empty"),
    (COMPLETIONS, {"guided_choice": "a"}, "guided_choice", "list of strings"),
    (COMPLETIONS, {"guided_grammar": 'root ::= "a'}, "guided_grammar", "line 1"),
    (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
    (COMPLETIONS, {"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    (COMPLETIONS, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a", "whitespace_pattern": ""}},
        "structured_outputs.whitespace_pattern",
        "requires json",
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}},
        "structured_outputs.whitespace_pattern",
        "requires json",
    ),
    (
        COMPLETIONS,
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "the structural tag cannot be used: format: is missing",
    ),
    (COMPLETIONS, {"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "string"),
    (GENERATE, {"sampling_params": {"structural_tag": "["}}, "sampling_params.structural_tag", "cannot be used"),
    (
        GENERATE,
        {"sampling_params": {"structural_tag": "[" * 50_000}},
        "sampling_params.structural_tag",
        "nests too deeply",
    ),
    (
        GENERATE,
        {"sampling_params": {"structural_tag": "{}", "regex": "a"}},
        "sampling_params.structural_tag",
        "sampling_params.regex is set too",
    ),
    (COMPLETIONS, {"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "did you mean json?"),
    (COMPLETIONS, {"json_schema": 5}, "json_schema", "must be a JSON schema"),
    (COMPLETIONS, {"ebnf": "foo"}, "ebnf", "the grammar cannot be used"),
    (GENERATE, {"sampling_params": {"regex": "(a"}}, "sampling_params.regex", "unclosed group"),
    (
        GENERATE,
        {"sampling_params": {"json_schema": "x"}},
        "sampling_params.json_schema",
        "the JSON schema cannot be used",
    ),
    (
        GENERATE,
        {"sampling_params": {"ebnf": "x", "regex": "y"}},
        "sampling_params.ebnf",
        "sampling_params.regex is set too",
    ),
    (
        GENERATE,
        {"text": ["a", "b"], "sampling_params": [{}, {"regex": "(a"}]},
        "sampling_params[1].regex",
        "unclosed group",
    ),
    (
        COMPLETIONS,
        {
            "guided_regex": "a",
            "custom_logit_processor": {"name": "disallowed_tokens"},
            "custom_params": {"token_ids": [999]},
        },
        "custom_params",
        "999",
    ),
    (
        COMPLETIONS,
        {"guided_regex": "a", "custom_logit_processor": {"name": "nobody"}},
        "custom_logit_processor",
        "nobody",
    ),
    (
        COMPLETIONS,
        {"custom_logit_processor": {"name": "grammar"}, "custom_params": {"regex": "("}},
        "custom_params",
        "the regular expression cannot be used",
    ),
    (COMPLETIONS, {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "json_schema", "nests too deeply"),
    (COMPLETIONS, {"guided_json": json.loads('{"items":' * 150 + "{}" + "}" * 150)}, "guided_json", "nest"),
]


@pytest.mark.parametrize(("path", "fields", "param", "says"), REFUSED, ids=[str(case[1])[:70] for case in REFUSED])
def test_refusal_names_the_field(real: Any, path: str, fields: dict[str, Any], param: str, says: str) -> None:
    error = error_of(real.post(path, {**PROMPTS[path], **fields}))
    assert error["param"] == param, error
    assert error["message"].startswith(f"{param}: ")
    assert says in error["message"]


@pytest.mark.slow
def test_server_survives_hostile_grammars(real: Any) -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(15_000))
    bomb = f'root ::= r0\n{rules}\nr15000 ::= "a"'
    error = error_of(real.post(COMPLETIONS, {**PROMPTS[COMPLETIONS], "ebnf": bomb}))
    assert "it nests too deeply: make it simpler" in error["message"]
    assert real.ok(COMPLETIONS, {**PROMPTS[COMPLETIONS], "ebnf": EBNF})["choices"][0]["text"] in ("acb", "addb")


def test_refusal_names_the_tool(real: Any) -> None:
    schemas: dict[str, Any] = {"good": SCHEMA, "bad": {"type": "object", "minProperties": "x"}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    body = {**PROMPTS[CHAT], "tools": tools, "tool_choice": "required"}
    message = real.post(CHAT, body).json()["error"]["message"]
    assert message.startswith("tools: the structural tag cannot be used: in the tag that begins with ")
    assert '"bad' in message.replace("\\", "")
    assert '"good' not in message.replace("\\", "")


def test_refusal_names_the_tool_whose_schema_cannot_end(real: Any) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("good", SCHEMA), ("bad", endless))
    ]
    message = real.post(CHAT, {**PROMPTS[CHAT], "tools": tools, "tool_choice": "required"}).json()["error"]["message"]
    assert '{"name": "bad", "parameters": ": no text matches it' in message.replace("\\", "")
