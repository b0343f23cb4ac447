"""`trace` on all three routes, with the real engine on the tiny model, and the status of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from logitship.client.http.responses import parse_generate, parse_openai
from logitship.client.http.sse import OpenAIStream, SGLangStream
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app
from logitship.server.http.json_responses import refusal_response
from logitship.server.refusals import (
    BadRequest,
    QueueFull,
    RequestRefused,
    ServiceUnavailable,
    ShareExceeded,
    Unauthorized,
)
from tests.helpers.answers import error_of

BAN = {"custom_logit_processor": {"name": "disallowed_tokens"}}
TEXT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": {"token_ids": [3, 4]}}
OPENAI = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": {"token_ids": [3, 4]}, **BAN}
GENERATE = {"text": "hello", "sampling_params": TEXT, **BAN}
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": GENERATE,
    "/v1/completions": {"prompt": "hello", **OPENAI},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **OPENAI},
}


@pytest.fixture(scope="module")
def http(make_module_engine: Callable[..., AsyncEngine]) -> Iterator[TestClient]:
    with TestClient(create_app(make_module_engine()), base_url="http://localhost") as client:
        yield client


def traces_of(answer: dict[str, Any]) -> Any:
    return answer["choices"][0].get("trace") if "choices" in answer else answer["meta_info"].get("trace")


@pytest.mark.parametrize("route", ROUTES)
def test_one_trace_per_token(route: str, http: TestClient) -> None:
    answer = http.post(route, json={**ROUTES[route], "trace": {"top": 5}}).json()
    traces = traces_of(answer)
    assert len(traces) == 4
    for trace in traces:
        assert [stage["stage"] for stage in trace["stages"]] == ["model", "request", "processor", "sampling"]
        model, _, processor, sampling = trace["stages"]
        assert processor["name"] == "disallowed_tokens"
        assert processor["digest"].startswith("sha256:")
        assert processor["num_allowed"] == model["num_allowed"] - 2
        assert sampling["num_allowed"] == 1
        place = [candidate["token_id"] for candidate in trace["candidates"]].index(trace["token_id"])
        assert sampling["logprobs"][place] == 0.0
        assert trace["candidates"][place] == {"token_id": trace["token_id"], "text": trace["text"]}
        assert all(len(stage["logprobs"]) == len(trace["candidates"]) for stage in trace["stages"])


@pytest.mark.parametrize("route", ROUTES)
def test_no_trace_by_default(route: str, http: TestClient) -> None:
    assert traces_of(http.post(route, json=ROUTES[route]).json()) is None
    assert traces_of(http.post(route, json={**ROUTES[route], "trace": None}).json()) is None


def test_default_top_is_20(http: TestClient) -> None:
    (trace, *_) = traces_of(http.post("/generate", json={**GENERATE, "trace": {}}).json())
    assert len(trace["candidates"]) >= 20


@pytest.mark.parametrize("route", ROUTES)
def test_streamed_traces_are_the_same(route: str, http: TestClient) -> None:
    body = {**ROUTES[route], "trace": {"top": 3}}
    whole = http.post(route, json=body).json()
    parsed: Any = parse_generate(whole, many=False) if route == "/generate" else parse_openai(whole, many=False)
    dialect = SGLangStream() if route == "/generate" else OpenAIStream()
    with http.stream("POST", route, json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [chunk for line in lines for chunk, _ in dialect.chunks(orjson.loads(line))]
    assert parsed.trace is not None
    assert len(parsed.trace) == 4
    assert tuple(trace for chunk in chunks for trace in chunk.trace or ()) == parsed.trace


def test_traces_per_continuation(http: TestClient) -> None:
    body = {
        **GENERATE,
        "sampling_params": {**TEXT, "n": 2, "temperature": 1.0, "sampling_seed": 5},
        "trace": {"top": 2},
    }
    for continuation in http.post("/generate", json=body).json():
        traced = [trace["token_id"] for trace in continuation["meta_info"]["trace"]]
        assert traced == continuation["output_ids"]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"top": 0}, "trace.top: "),
        ({"top": 101}, "trace.top: "),
        ({"top": "3"}, "trace.top: "),
        ({"top": 2.5}, "trace.top: "),
        ({"tops": 3}, "trace.tops: unknown field, did you mean top?"),
        (True, "trace: "),
        (3, "trace: "),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_invalid_trace_options(route: str, trace: Any, message: str, http: TestClient) -> None:
    assert error_of(http.post(route, json={**ROUTES[route], "trace": trace}))["message"].startswith(message)


@pytest.mark.parametrize("route", ROUTES)
def test_no_traces_with_beam_search(route: str, http: TestClient) -> None:
    body = dict(ROUTES[route])
    if route == "/generate":
        body["sampling_params"] = {**TEXT, "num_beams": 2}
    else:
        body["num_beams"] = 2
    assert error_of(http.post(route, json={**body, "trace": {"top": 3}}))["param"] == "trace"


def test_limit_on_traced_processors(http: TestClient) -> None:
    several = [{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [3]}}] * 17
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}, "logits_processors": several}
    assert http.post("/generate", json=body).status_code == 200
    assert error_of(http.post("/generate", json={**body, "trace": {"top": 3}}))["param"] == "trace"


@pytest.mark.parametrize(
    ("refused", "status", "retry_after"),
    [
        (BadRequest("no"), 400, None),
        (Unauthorized("no"), 401, None),
        (QueueFull("no"), 429, "1"),
        (ShareExceeded("no", retry_after=7), 429, "7"),
        (ServiceUnavailable("no"), 503, "1"),
    ],
)
def test_refusals_say_when_to_try_again(refused: RequestRefused, status: int, retry_after: str | None) -> None:
    response = refusal_response(refused)
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
