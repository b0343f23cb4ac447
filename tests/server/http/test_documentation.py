"""The OpenAPI document: every field has a description and an example, and responses match their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app
from tests.helpers.engine_requests import BuildEngine

SOURCE = """
from logitship import CustomLogitProcessor

class Plus(CustomLogitProcessor):
    '''Adds to a token.'''
    def __call__(self, logits, custom_param_list=None):
        return logits + 0

class Divide(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits / (1 // 0)
"""
PLUS = {"source": SOURCE, "class_name": "Plus"}
DIVIDE = {"source": SOURCE, "class_name": "Divide"}
BAN = {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [30]}}


class Documented:
    """A running app with its OpenAPI document."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.http = TestClient(create_app(engine), base_url="http://localhost", raise_server_exceptions=False)
        self.document: dict[str, Any] = self.http.get("/openapi.json").json()

    def validator(self, schema: Any) -> Draft202012Validator:
        return Draft202012Validator({**schema, "components": self.document["components"]})

    def answer(self, method: str, path: str, body: Any = None, *, route: str | None = None) -> Any:
        """Send a request and validate the response against its schema."""
        answer = self.http.request(method, path, json=body)
        responses = self.document["paths"][route or path.partition("?")[0]][method.lower()]["responses"]
        documented = responses.get(str(answer.status_code)) or responses[f"{answer.status_code // 100}XX"]
        data = answer.json()
        self.validator(documented["content"]["application/json"]["schema"]).validate(data)
        return data

    def events(self, path: str, body: Any) -> list[Any]:
        """Send a streaming request and validate the events against their schema."""
        answer = self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        stream = self.document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        validator = self.validator(stream["contentSchema"])
        *lines, done = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
        assert done == "[DONE]"
        events = [orjson.loads(line) for line in lines]
        for event in events:
            validator.validate(event)
        return events


@pytest.fixture
def documented(make_engine: BuildEngine) -> Iterator[Documented]:
    app = Documented(make_engine())
    yield app
    app.http.close()


# --- the document ---


def objects_in(schema: Any, at: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object schema with properties, with its path."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and "examples" not in at:
            yield at, schema
        for name, each in schema.items():
            if name not in ("examples", "example"):
                yield from objects_in(each, f"{at}/{name}")
    elif isinstance(schema, list):
        for place, each in enumerate(schema):
            yield from objects_in(each, f"{at}/{place}")


def test_every_field_has_a_description_and_a_valid_example(documented: Documented) -> None:
    wrong = []
    count = 0
    for at, schema in objects_in(documented.document, ""):
        for name, field in schema["properties"].items():
            count += 1
            if not field.get("description"):
                wrong.append(f"{at}: {name} has no description")
            if not field.get("examples"):
                wrong.append(f"{at}: {name} has no example")
            for example in field.get("examples", ()):
                errors = documented.validator(field).iter_errors(example)
                wrong += [f"{at}: the example of {name}: {error.message}" for error in errors]
    assert wrong == []
    assert count > 250


def test_every_parameter_has_a_description_and_an_example(documented: Documented) -> None:
    operations = [each for path in documented.document["paths"].values() for each in path.values()]
    parameters = [each for operation in operations for each in operation.get("parameters", ())]
    assert [
        each["name"] for each in parameters if not (each.get("description") and each["schema"].get("examples"))
    ] == []
    assert len(parameters) > 3


def test_every_route_documents_its_responses(documented: Documented) -> None:
    for path, methods in documented.document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), path
            assert set(operation["responses"]) >= {"200", "4XX", "5XX"}, (path, method)
            assert "422" not in operation["responses"]
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    assert content["schema"], (path, method)


def test_body_examples_are_valid(documented: Documented) -> None:
    checked = 0
    for path in documented.document["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "example" in content:
                documented.validator(content["schema"]).validate(content["example"])
                checked += 1
    assert checked >= 5


def test_references_resolve(documented: Documented) -> None:
    text = orjson.dumps(documented.document).decode()
    names = {piece.split('"')[0] for piece in text.split("#/components/schemas/")[1:]}
    assert names <= set(documented.document["components"]["schemas"])


def test_document_is_stable(documented: Documented) -> None:
    assert documented.http.get("/openapi.json").json() == documented.document


# --- examples run ---


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_body_example_runs(path: str, documented: Documented) -> None:
    example = documented.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    body = {**example, "model": "default"} if "model" in example else example
    assert "error" not in documented.answer("POST", path, body)


# --- responses match their schemas ---

SHORT = {"sampling_params": {"max_new_tokens": 4}}
"""Each event repeats what came before, and a validation in Python takes a millisecond for each token."""
PACKED = {"return_sampling_mask": True, "sampling_mask_format": "packed"}
GENERATE: list[dict[str, Any]] = [
    {"text": "a"},
    {"text": ["a", "b"], "rid": "batch"},
    {"text": "a", "sampling_params": {"n": 2, "max_new_tokens": 2, "temperature": 1.0}},
    {"text": "ab", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, **SHORT},
    {"text": "ab", "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True, **SHORT},
    {"text": "a", "logits_processors": [BAN], "trace": {"top": 2}, **SHORT},
    {"text": "a", "custom_logit_processor": PLUS, "trace": {"top": 2}, "sampling_params": {"max_new_tokens": 2}},
    {"text": "a", "return_sampling_mask": True, "sampling_params": {"max_new_tokens": 4, "top_k": 3}},
    {"text": "a", **PACKED, **SHORT},
    {"text": "a", "sampling_params": {"ignore_eos": False, "stop": ["a", "b", "c", "d"], "max_new_tokens": 200}},
]


@pytest.mark.parametrize("body", GENERATE, ids=str)
def test_generate(body: dict[str, Any], documented: Documented) -> None:
    assert "error" not in documented.answer("POST", "/generate", body)
    assert documented.events("/generate", body)


def test_generate_with_beams(documented: Documented) -> None:
    body = {"text": "a", "sampling_params": {"num_beams": 2, "n": 2, "max_new_tokens": 3}}
    answer = documented.answer("POST", "/generate", body)
    assert {"cumulative_logprob", "beam_score"} <= set(answer[0]["meta_info"])


OPENAI: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"logits_processors": [BAN], "trace": {"top": 2}},
    {"custom_logit_processor": PLUS, "return_token_ids": True},
    {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "top_k": 3},
    {**PACKED, "n": 2},
    {"stop": ["a", "b", "c", "d", "e"], "max_tokens": 200},
]
COMPLETIONS: list[dict[str, Any]] = [
    *OPENAI,
    {"prompt": ["a", "b"]},
    {"echo": True, "logprobs": 2, "max_tokens": 2},
    {"max_tokens": 0, "echo": True, "logprobs": 1},
]
CHATS: list[dict[str, Any]] = [*OPENAI, {"logprobs": True, "top_logprobs": 2}]


@pytest.mark.parametrize("fields", COMPLETIONS, ids=str)
def test_completions(fields: dict[str, Any], documented: Documented) -> None:
    body = {"prompt": "ab", "max_tokens": 3, **fields}
    assert documented.answer("POST", "/v1/completions", body)["choices"]
    assert documented.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})


@pytest.mark.parametrize("fields", CHATS, ids=str)
def test_chats(fields: dict[str, Any], documented: Documented) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}
    assert documented.answer("POST", "/v1/chat/completions", body)["choices"]
    assert documented.events("/v1/chat/completions", {**body, "stream_options": {"continuous_usage_stats": True}})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs(path: str, documented: Documented) -> None:
    prompt = {"prompt": "ab"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    documented.answer("POST", path, {**prompt, "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True})


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_errors(path: str, documented: Documented) -> None:
    prompt = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}.get(
        path, {"messages": [{"role": "user", "content": "a"}]}
    )
    assert documented.answer("POST", path, {**prompt, "top_kk": 1})["error"]["param"] == "top_kk"
    failed = documented.answer("POST", path, {**prompt, "custom_logit_processor": DIVIDE})
    assert failed["error"]["kind"] == "exception"
    assert documented.events(path, {**prompt, "custom_logit_processor": DIVIDE})


def test_models_and_the_server(documented: Documented) -> None:
    for path in ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        documented.answer("GET", path)
    documented.answer("GET", "/v1/models/tiny", route="/v1/models/{name}")
    assert "error" in documented.answer("GET", "/v1/models/huge", route="/v1/models/{name}")


def test_processors(documented: Documented) -> None:
    path = "/v1/processors"
    uploaded = documented.answer("POST", path, PLUS)
    documented.answer("POST", f"{path}?name=Other", PLUS)
    assert len(documented.answer("GET", path)["data"]) > 2
    for name in (uploaded["id"], uploaded["digest"], "disallowed_tokens"):
        documented.answer("GET", f"{path}/{name}", route=f"{path}/{{id}}")
    assert documented.answer("DELETE", f"{path}/{uploaded['id']}", route=f"{path}/{{id}}")["deleted"]
    assert "error" in documented.answer("GET", f"{path}/nothing", route=f"{path}/{{id}}")
    assert "error" in documented.answer("POST", path, {"digest": "sha256:" + "0" * 64})
