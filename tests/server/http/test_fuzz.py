"""Random mutations of valid bodies: none of them may break the server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app

CASES = 300
CONTROL = {
    "text": "hello",
    "sampling_params": {"temperature": 1.2, "top_p": 0.9, "sampling_seed": 8, "ignore_eos": True},
}

SHIPPED = """
from logitship import CustomLogitProcessor

class Shipped(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {}
"""
PROCESSORS: list[Any] = [
    {"source": SHIPPED.format(body), "class_name": "Shipped"}
    for body in (
        "return logits",
        "return logits * custom_param_list[0]['by']",
        "custom_param_list[0]['__req__'].output_ids = None; return logits",
        "return logits * float('nan')",
        "logits.resize_(1); return logits",
    )
]
SAMPLING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "stop": ["x", "é"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "no_stop_trim": True,
    "logit_bias": {"70": 1.5},
    "allowed_token_ids": [70, 71, 72, 200],
    "bad_words": ["no", "é"],
    "logprobs_mode": "processed_logprobs",
    "custom_params": {"by": 2, "token_ids": [5]},
}
OPENAI: dict[str, Any] = {
    **SAMPLING,
    "model": "tiny",
    "seed": 3,
    "max_tokens": 5,
    "min_tokens": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "vllm_xargs": {"a": 1},
    "request_id": "r",
    "custom_logit_processor": PROCESSORS[0],
}
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": ["a", "bc"],
        "sampling_params": {**SAMPLING, "min_new_tokens": 1, "sampling_seed": 3},
        "custom_logit_processor": [PROCESSORS[0], None],
        "stream": True,
        "rid": ["r", "s"],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    },
    "/v1/completions": {**OPENAI, "prompt": "ab", "logprobs": 2, "echo": True},
    "/v1/chat/completions": {
        **OPENAI,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/processors": PROCESSORS[0],
    "/abort_request": {"rid": "r", "abort_all": True},
}
TEXTS = [
    *("null", "true", "0", "-1", "1", "3", "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e999", "NaN", "-Infinity"),
    *("9223372036854775808", "-9223372036854775808", "18446744073709551616", "1" + "0" * 5000),
    *('""', '"a"', r'"\u0000"', r'"\ud800"', '"\\ud83d\\ude00"', f'"{"x" * 10_000}"', "tru", '"', ","),
    *("[]", "[[]]", "[null]", "[1]", '["a"]', '["a", "b"]', "[[5], [6]]", "[-9223372036854775808]", "[1e3]"),
    *("[" * depth + "]" * depth for depth in (90, 300, 1000, 5000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (90, 300, 1000)),
    *("{}", '{"70": 1e308}', '{"70": 3e38}', '{"1e1": 1}', '{"²": 1}', f'{{"{"9" * 5000}": 1}}', '{"__req__": 1}'),
    f"[{'70,' * 10_000}70]",
    f"[{','.join(f'{chr(34)}zq{number}{chr(34)}' for number in range(2000))}]",
    *(orjson.dumps(processor).decode() for processor in PROCESSORS),
    f"[{orjson.dumps(PROCESSORS[0]).decode()}, {orjson.dumps(PROCESSORS[1]).decode()}]",
    orjson.dumps([{"name": "disallowed_tokens"}] * 100).decode(),
    *('{"name": "x"}', '{"digest": "sha256:0"}', '{"callable": "80"}', r'{"source": "raise ValueError(\"\\ud800\")"}'),
]
"""Replacement values, as JSON or almost JSON."""


KEPT = {"text", "prompt", "messages", "sampling_params", "logprobs", "source", "class_name", "rid"}
"""Required fields, without which most bodies would be refused."""


def _good(rng: random.Random, path: str) -> dict[str, Any]:
    """Create a valid body with random fields."""
    body = {name: value for name, value in GOOD[path].items() if name in KEPT or rng.random() < 0.5}
    if "sampling_params" in body:
        given = body["sampling_params"].items()
        body["sampling_params"] = {name: value for name, value in given if rng.random() < 0.5} | {"max_new_tokens": 5}
    if "custom_logit_processor" in body:
        shipped = rng.choice(PROCESSORS)
        body["custom_logit_processor"] = [shipped, None] if path == "/generate" else shipped
    if "stream" not in body:
        body.pop("stream_options", None)
    return body


def _spoilt(rng: random.Random, path: str) -> bytes:
    """Create a valid body, then replace a few values and sometimes a few bytes."""
    body = _good(rng, path)
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        inner = body.get("sampling_params")
        target = inner if isinstance(inner, dict) and rng.random() < 0.5 else body
        target[rng.choice([*target, "unknown"])] = f"@{rng.randrange(len(TEXTS))}@"
    text = orjson.dumps(body).decode()
    for number, replacement in enumerate(TEXTS):
        text = text.replace(f'"@{number}@"', replacement)
    raw = text.encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) * rng.randrange(3) + raw[at + rng.randrange(2) :]
    return raw if rng.random() > 0.05 else raw[: rng.randrange(len(raw))]


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, bytes]]:
    rng = random.Random(2026)
    return [(path, _spoilt(rng, path)) for path in rng.choices(list(GOOD), weights=[4, 3, 3, 1, 1], k=CASES)]


@pytest.fixture
def client(make_engine: Callable[..., AsyncEngine]) -> Iterator[TestClient]:
    settings: dict[str, Any] = {"max_model_len": 64, "max_queued_requests": 8, "enable_custom_logit_processor": True}
    with TestClient(create_app(make_engine(**settings)), base_url="http://localhost") as client:
        yield client


def control(client: TestClient) -> Any:
    answer = client.post("/generate", json=CONTROL)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def errors_in(answer: Any) -> Iterator[Any]:
    """Return the errors of a response or of its events."""
    if answer.status_code != 200:
        yield answer.json()["error"]
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        bodies = [orjson.loads(event.removeprefix("data: ")) for event in events]
        yield from (body["error"] for body in bodies if "error" in body)


def test_random_bodies_never_break_the_server(
    client: TestClient, cases: list[tuple[str, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    alone = control(client)
    statuses = set()
    for number, (path, body) in enumerate(cases):
        answer = client.post(path, content=body)
        case = f"case {number}: {path} {body[:2000]!r}: {answer.text[:2000]}"
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, case
        for error in errors_in(answer):
            assert {"message", "type", "param", "code"} <= error.keys(), case
            assert error["message"], case
            assert error["type"].lower() not in ("internal_server_error", "internalservererror"), case
        statuses.add(answer.status_code)
        if number % 50 == 0:
            assert control(client) == alone, case
    assert {200, 400} <= statuses
    assert control(client) == alone
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
    (state,) = client.get("/server_info").json()["internal_states"]
    assert (state["running"], state["waiting"]) == (0, 0)
