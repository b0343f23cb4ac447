from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from logitship.client.records import Receipt
from logitship.server.http import request_log
from logitship.server.http.request_log import RequestLogMiddleware, RequestRecord
from logitship.server.logs import JSONFormatter, TextFormatter
from logitship.server.requests.messages import ABSENT, GenerationChunk, GenerationRequest

FakeEngine = Any
PROMPT = "the prompt's secret"
KEY = "the-key's-secret"
DIGEST = "sha256:" + "1" * 64
MINE = {"custom_logit_processor": {"source": "the source's secret", "class_name": "Mine"}}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return the fields of the lines so far, and clear them."""
    caplog.set_level(logging.INFO, request_log.__name__)

    def take() -> list[dict[str, Any]]:
        found = [record.__dict__["fields"] for record in caplog.records if record.name == request_log.__name__]
        caplog.clear()
        return found

    return take


Lines = Callable[[], list[dict[str, Any]]]


class Progress:
    """Requests whose processors have these digests."""

    continuations: tuple[()] = ()
    first_token_at = None

    def __init__(self, digests: list[str]) -> None:
        self.digests = digests


def test_one_line_per_request(client: Any, lines: Lines) -> None:
    client.ok("/generate", {"text": PROMPT})
    [line] = lines()
    assert 0 < line.pop("ttft_seconds") <= line.pop("duration_seconds")
    assert line == {
        "method": "POST",
        "path": "/generate",
        "status": 200,
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 4,
        "finish_reasons": ["stop"],
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_stream(path: str, client: Any, lines: Lines) -> None:
    client.events(path, {"prompt": "a"} if path == "/v1/completions" else {"text": "a"})
    [line] = lines()
    assert (line["status"], line["completion_tokens"], line["finish_reasons"]) == (200, 4, ["stop"])
    assert line["ttft_seconds"] <= line["duration_seconds"]


def test_processor_times_are_summed_over_continuations(shipping_client: Any, lines: Lines) -> None:
    shipping_client.ok("/v1/completions", {"prompt": ["a", "b"], "n": 2, **MINE})
    [line] = lines()
    assert line["processors"] == [{"name": "Mine", "digest": DIGEST, "milliseconds": 1.0}]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 16)
    assert line["finish_reasons"] == ["stop"] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_digests_of_the_processors_in_a_header(stream: bool, shipping_client: Any) -> None:
    body = {"prompt": "a", "stream": stream, "custom_logit_processor": [MINE["custom_logit_processor"]] * 2}
    assert shipping_client.post("/v1/completions", body).headers["X-Logitship-Processors"] == DIGEST
    assert "X-Logitship-Processors" not in shipping_client.post("/v1/completions", {"prompt": "a"}).headers


def test_the_header_has_a_bounded_length() -> None:
    record = RequestRecord(None)
    record.follow(Progress([f"sha256:{i}" for i in range(1000)]), None)
    assert record.headers["X-Logitship-Processors"].split(", ") == [f"sha256:{i}" for i in range(32)]


def test_processor_fault(
    engine: FakeEngine, client: Any, lines: Lines, failing: Callable[[GenerationRequest], list[GenerationChunk]]
) -> None:
    engine.script = failing
    client.post("/generate", {"text": "a"})
    client.events("/v1/completions", {"prompt": "a"})
    for line, status in zip(lines(), (400, 200), strict=True):
        assert line["status"] == status
        assert line["finish_reasons"] == ["error"]
        assert line["error"]["type"] == "ProcessorFault"
        assert (line["error"]["processor"], line["error"]["digest"]) == ("Bad", "sha256:" + "0" * 64)


def test_continuations_that_have_not_begun(
    engine: FakeEngine, client: Any, lines: Lines, failing: Callable[[GenerationRequest], list[GenerationChunk]]
) -> None:
    engine.script = failing
    client.post("/generate", {"text": "a", "sampling_params": {"n": 2}})
    [line] = lines()
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (1, 1, ["error"])


def test_outputs_that_a_beam_search_did_not_find(
    engine: FakeEngine, client: Any, lines: Lines, text_script: Callable[[str], Any]
) -> None:
    def finds_one(request: GenerationRequest) -> list[GenerationChunk]:
        chunks: list[GenerationChunk] = text_script("")(request)
        return [chunks[0], *(replace(each, token_ids=[], finish_reason=ABSENT) for each in chunks[1:])]

    engine.script = finds_one
    body = {"prompt": "a", "n": 3, "use_beam_search": True, "max_tokens": 1, "temperature": 0}
    assert len(client.ok("/v1/completions", body)["choices"]) == 1
    [line] = lines()
    assert line["finish_reasons"] == ["stop"]


def test_refusals(client: Any, lines: Lines) -> None:
    client.post("/generate", {"text": "a", PROMPT: 1})
    client.http.get("/v1/models/another")
    client.http.get("/nothing")
    client.http.post("/generate", content=b"no json")
    found = [(line["status"], line.get("error")) for line in lines()]
    refused = {"type": "invalid_request_error"}
    assert found == [(400, refused), (404, {"type": "not_found_error"}), (404, None), (400, refused)]


async def test_disconnect(engine: FakeEngine, client: Any, lines: Lines) -> None:
    engine.hangs = True
    left = [{"type": "http.request", "body": b'{"text": "a"}'}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        if len(left) == 1:
            await asyncio.to_thread(engine.hung.wait)
        return left.pop(0)

    async def send(message: Message) -> None:
        pass

    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "query_string": b"",
        "headers": [],
        "root_path": "",
    }
    await client.http.app(scope, receive, send)
    [line] = lines()
    assert (line["status"], line["completion_tokens"], line["finish_reasons"]) == (499, 3, [])


# --- ids ---


def id_of(answer: Any) -> str:
    found: str = answer.headers["x-request-id"]
    return found


@pytest.mark.parametrize("own", ["abc-1", "a" * 128, "00-4bf92f3577b34da6a3ce929d0e0e4736-01", "a/b+c=d@e:f.g_h"])
def test_client_supplied_id(own: str, client: Any) -> None:
    body = {"text": "a", "rid": "another"}
    assert id_of(client.http.post("/generate", json=body, headers={"X-Request-ID": own})) == own
    assert id_of(client.http.get("/v1/models", headers={"X-Request-ID": own})) == own


@pytest.mark.parametrize("own", ["", "a" * 129, "two words", "semi;colon", '"', "é".encode("latin-1"), b"\x01"])
def test_unsafe_client_supplied_id(own: str | bytes, client: Any) -> None:
    headers = {b"X-Request-ID": own if isinstance(own, bytes) else own.encode()}
    assert id_of(client.http.post("/generate", json={"text": "a", "rid": "mine"}, headers=headers)) == "mine"
    assert len(id_of(client.http.get("/v1/models", headers=headers))) == 32


def test_default_id_is_the_response_id(client: Any) -> None:
    answer = client.post("/v1/completions", {"prompt": "a"})
    assert id_of(answer) == answer.json()["id"]
    answer = client.post("/v1/completions", {"prompt": ["a", "b"]})
    assert id_of(answer) == answer.json()["id"]
    chat = {"messages": [{"role": "user", "content": "a"}], "rid": "mine"}
    assert id_of(client.post("/v1/chat/completions", chat)) == "mine"
    assert id_of(client.post("/generate", {"text": ["a", "b"], "rid": "batch"})) == "batch"
    answer = client.post("/generate", {"text": "a", "stream": True})
    assert id_of(answer) in answer.text


def test_generated_id(client: Any) -> None:
    several = client.post("/generate", {"text": ["a", "b"]})
    assert id_of(several) not in several.text
    assert len(id_of(several)) == 32
    assert id_of(client.http.get("/nothing")) != id_of(client.http.get("/nothing"))


def test_id_in_a_body_cannot_inject_a_header(client: Any) -> None:
    answer = client.post("/generate", {"text": "a", "rid": "x\r\nSet-Cookie: a=b"})
    assert answer.status_code == 200
    assert len(id_of(answer)) == 32
    assert "set-cookie" not in answer.headers


def test_log_lines_have_the_request_id(
    engine: FakeEngine, client: Any, caplog: pytest.LogCaptureFixture, formatted: Callable[[], list[str]]
) -> None:
    engine.refuse_all = KeyError("a mistake")
    answer = client.http.post("/generate", json={"text": "a"}, headers={"X-Request-ID": "mine"})
    assert answer.status_code == 500
    failed, line = formatted()
    assert "POST /generate failed [mine]" in failed
    assert "KeyError" in failed
    assert line.endswith("[mine]")


@pytest.fixture
def formatted() -> Any:
    """Format the log records as text."""
    logger = logging.getLogger("logitship")
    handler = _Formatting()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield lambda: handler.text
    logger.setLevel(level)
    logger.removeHandler(handler)


class _Formatting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.json: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(TextFormatter().format(record))
        self.json.append(JSONFormatter().format(record))


# --- what is not in it ---


def test_prompts_outputs_and_keys_are_not_logged(
    make_fake_engine: Callable[..., FakeEngine],
    make_client: Callable[[FakeEngine], Any],
    formatted: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    text_script: Callable[[str], Any],
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = make_fake_engine(api_key=KEY, enable_custom_logit_processor=True)
    engine.script = text_script("the output")
    http = make_client(engine).http
    http.headers["Authorization"] = f"Bearer {KEY}"
    for path, body in {
        "/generate": {"text": PROMPT},
        "/v1/completions": {"prompt": PROMPT},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    }.items():
        for more in ({}, {"stream": True}, MINE, {PROMPT: PROMPT}, {"stop": {PROMPT: 1}}, {"custom_params": PROMPT}):
            http.post(path, json={**body, **more})
        http.post(path, json=body, headers={"Authorization": f"Bearer {KEY}{KEY}"})
        http.post(path, content=PROMPT.encode())
        http.get(f"{path}?key={KEY}")
    text = "".join(formatted())
    assert text.count("POST /generate 200") == 3
    assert text.count(" 401 ") == 3
    assert "secret" not in text
    assert "the output" not in text
    assert http.get("/v1/models").status_code == 200
    assert "[" in text


def test_tenant_is_logged_instead_of_the_key(
    make_fake_engine: Callable[..., FakeEngine], make_client: Callable[[FakeEngine], Any], lines: Lines
) -> None:
    http = make_client(make_fake_engine(api_key=(KEY, "another"))).http
    for key in (KEY, "another", KEY, "wrong"):
        http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    tenants = [line.get("tenant") for line in lines()]
    assert tenants[0] == tenants[2] != tenants[1]
    assert tenants[3] is None
    assert all(len(tenant) == 16 for tenant in tenants[:3] if tenant)


def test_path_is_escaped(client: Any, lines: Lines, formatted: Callable[[], list[str]]) -> None:
    client.http.get("/a%0Ab%20c%1b?query")
    assert lines()[0]["path"] == "/a%0Ab%20c%1B"
    client.http.get("/" + "a" * 1000)
    assert len(lines()[0]["path"]) == 200
    assert all("\n" not in line for line in formatted())


def test_processor_names_are_escaped(
    engine: FakeEngine, client: Any, lines: Lines, formatted: Callable[[], list[str]], text_script: Callable[[str], Any]
) -> None:
    def named(request: GenerationRequest) -> list[GenerationChunk]:
        *chunks, last = text_script("a")(request)
        return [*chunks, replace(last, receipts=(Receipt(DIGEST, "a\nb\x1b" + "c" * 500, 1, 0.5),))]

    engine.script = named
    client.post("/generate", {"text": "a"})
    [line] = formatted()
    assert "a\\nb\\x1bccc" in line
    assert len(line) < 500


# --- what is quiet, and what is counted ---


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_polled_paths_are_logged_at_debug(
    path: str, engine: FakeEngine, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, request_log.__name__)
    client.http.get(path)
    engine.alive = False
    client.http.get("/health")
    levels = [record.levelname for record in caplog.records if record.name == request_log.__name__]
    assert levels == ["DEBUG", "INFO"]


def test_metric_labels_are_bounded(new_engine: FakeEngine, make_client: Any) -> None:
    client = make_client(new_engine)
    client.http.get("/v1/models/tiny")
    for number in range(3):
        client.http.get(f"/nothing/{number}")
        client.http.request(f"METHOD{number}", "/generate")
    counted = {
        tuple(sample.labels.values()): sample.value
        for metric in new_engine.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "logitship_http_requests_total"
    }
    assert counted == {
        ("GET", "/v1/models/{name:path}", "200"): 1,
        ("GET", "other", "404"): 3,
        ("other", "/generate", "405"): 3,
    }


def test_aborted_response_is_logged(engine: FakeEngine, lines: Lines) -> None:
    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ConnectionError

    async def ask() -> None:
        async def receive() -> Message:
            raise AssertionError

        async def send(message: Message) -> None:
            assert dict(message["headers"])[b"x-request-id"]

        scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        await RequestLogMiddleware(cut, engine.metrics)(scope, receive, send)

    with pytest.raises(ConnectionError):
        asyncio.run(ask())
    assert [line["status"] for line in lines()] == [200]


def test_non_http_scopes_pass_through(engine: FakeEngine) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(RequestLogMiddleware(app, engine.metrics)({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]
