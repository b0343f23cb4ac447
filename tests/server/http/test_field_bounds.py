"""Every list and string of a request has a bound, in the OpenAPI document and in the 400."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from logitship.server.http.app import create_app
from logitship.server.schemas import request_schema
from tests.helpers.answers import error_of

REQUESTS = ("CompletionRequest", "ChatCompletionRequest", "GenerateRequest", "SGLangSamplingParams", "AbortRequest")
BOUNDED_BY_THE_MODEL = {"prompt", "text", "content"}
"""Fields whose texts are bounded by the model's length, in tokens."""
PATHS = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def unbounded(schema: Any, at: tuple[str, ...], schemas: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of lists and strings without a bound."""
    if not isinstance(schema, dict):
        return
    if (name := schema.get("$ref", "").rpartition("/")[2]) and name not in at:
        yield from unbounded(schemas[name], (*at, name), schemas)
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield at
    if schema.get("type") == "string" and not {"maxLength", "enum", "const"} & schema.keys():
        yield at
    for name, field in schema.get("properties", {}).items():
        yield from unbounded(field, (*at, name), schemas)
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from unbounded(values, at, schemas)
    yield from unbounded(schema.get("items"), at, schemas)
    for each in schema.get("anyOf", ()):
        yield from unbounded(each, at, schemas)


@pytest.mark.parametrize("name", REQUESTS)
def test_document_names_a_bound_for_every_list_and_string(name: str, engine: Any) -> None:
    schemas = create_app(engine).openapi()["components"]["schemas"]
    found = set(unbounded(schemas[name], (name,), schemas))
    assert {at for at in found if not BOUNDED_BY_THE_MODEL & set(at)} == set()


def cases() -> Iterator[tuple[str, Any, str]]:
    for field, value, says in (
        ("stop", ["x"] * 1025, "has 1025 entries, at most 1024"),
        ("stop", "x" * 1025, "a string of 1025 characters, at most 1024"),
        ("stop", ["a", "x" * 1025], "a string of 1025 characters, at most 1024"),
        ("stop_regex", ["x"] * 33, "has 33 entries, at most 32"),
        ("stop_regex", "x" * 257, "a string of 257 characters, at most 256"),
        ("stop_token_ids", [1] * 4097, "has 4097 entries, at most 4096"),
        ("bad_words", ["x"] * 1025, "has 1025 entries, at most 1024"),
        ("bad_words", ["x" * 257], "a string of 257 characters, at most 256"),
        ("logit_bias", {str(i): 1 for i in range(65537)}, "has 65537 entries, at most 65536"),
        ("allowed_token_ids", [1] * ((1 << 19) + 1), "at most 524288"),
        ("n", 65537, "at most 65536"),
        ("num_beams", 65537, "at most 65536"),
        ("regex", "x" * 262145, "at most 262144"),
        ("json_schema", "x" * 262145, "at most 262144"),
    ):
        yield "/generate", {"sampling_params": {field: value}}, f"sampling_params.{field}: | {says}"
        yield "/v1/completions", {field: value}, f"{field}: | {says}"
        yield "/v1/chat/completions", {field: value}, f"{field}: | {says}"
    for path in PATHS:
        yield path, {"rid": "x" * 1025}, "rid: | at most 1024"
        yield path, {"logits_processors": [1] * 65537}, "logits_processors: | at most 65536"
    yield "/generate", {"text": ["a"] * 65537}, "text: | has 65537 entries, at most 65536"
    yield "/generate", {"text": None, "input_ids": [[1]] * 65537}, "input_ids: | has 65537 entries, at most 65536"
    yield "/generate", {"return_logprob": [True] * 65537}, "return_logprob: | has 65537 entries, at most 65536"
    yield "/generate", {"rid": ["x" * 1025]}, "rid: | a string of 1025 characters, at most 1024"
    yield "/v1/completions", {"prompt": ["a"] * 65537}, "prompt: | has 65537 entries, at most 65536"
    yield "/v1/completions", {"prompt": [[1]] * 65537}, "prompt: | has 65537 entries, at most 65536"
    yield "/v1/completions", {"best_of": 65537}, "best_of: | at most 65536"
    yield "/v1/completions", {"guided_choice": ["a"] * 16385}, "guided_choice: | at most 16384"
    yield "/v1/completions", {"structured_outputs": {"choice": ["a"] * 16385}}, "choice: | at most 16384"
    message = {"role": "user", "content": "a"}
    yield "/v1/chat/completions", {"messages": [message] * 16385}, "messages: | at most 16384"
    yield "/v1/chat/completions", {"messages": [{**message, "name": "x" * 1025}]}, "messages[0].name: | at most 1024"
    parts = [{"type": "text", "text": "a"}] * 16385
    yield "/v1/chat/completions", {"messages": [{**message, "content": parts}]}, "messages[0].content: | at most 16384"
    variables = {"chat_template_kwargs": {str(i): 1 for i in range(257)}}
    yield "/v1/chat/completions", variables, "chat_template_kwargs: | at most 256"


@pytest.mark.parametrize(("path", "change", "says"), list(cases()), ids=lambda value: str(value)[:40])
def test_value_beyond_its_bound_is_refused(path: str, change: dict[str, Any], says: str, client: Any) -> None:
    message = error_of(client.http.post(path, content=orjson.dumps({**PATHS[path], **change})))["message"]
    for part in says.split(" | "):
        assert part in message
    assert len(message) < 300


def test_token_ids_beyond_their_bound_are_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_schema, "MAX_PROMPT_TOKENS", 4)
    for path, field in (("/v1/completions", "prompt"), ("/generate", "input_ids"), ("/detokenize", "tokens")):
        for value in ([1] * 5, [[1], [1] * 5]):
            error = client.post(path, {field: value}).json()["error"]
            assert error["message"] == f"{field}: has 5 entries, at most 4 are allowed"
            assert error["param"] == field


def test_long_list_of_a_wrong_type_is_refused_for_its_type(client: Any) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
        answer = client.http.post(path, content=orjson.dumps({field: [*[1] * 65537, "a"]}))
        assert "list of token ids (integers)" in answer.json()["error"]["message"]


@pytest.fixture
def engine(engine: Any) -> Any:
    """An engine that takes bodies of the default size, and with more elements than by default."""
    engine.config = replace(engine.config, max_request_bytes=1 << 24, max_request_elements=1 << 22)
    return engine


def test_values_at_their_bounds_are_accepted(client: Any, engine: Any) -> None:
    engine.model = replace(engine.model, max_model_len=1 << 20)
    body = {
        "prompt": [1] * 200_000,
        "max_tokens": 1,
        "stop": ["x" * 1024] * 1024,
        "bad_words": ["x" * 256] * 1024,
        "logit_bias": {str(i): 1 for i in range(256)},
        "allowed_token_ids": list(range(256)) * 100,
        "rid": "x" * 1024,
    }
    answer = client.http.post("/v1/completions", content=orjson.dumps(body))
    assert answer.status_code == 200, answer.text
