"""Both clients with an in-process transport: they behave the same."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import asdict
from typing import Any

import httpx
import orjson
import pytest
import torch

from logitship.client.async_client import AsyncClient
from logitship.client.client import Client
from logitship.client.errors import (
    AuthenticationError,
    BadRequestError,
    GenerationError,
    ServerBusyError,
    TransportError,
)
from logitship.client.http.server_dialect import ServerKind
from logitship.client.processor import CustomLogitProcessor
from logitship.client.processor_info import ProcessorDetails, ProcessorInfo
from logitship.client.records import Generation, GenerationChunk
from logitship.client.serialization.artifact import digest_of, raw_bytes
from logitship.client.serialization.processor_string import RegisteredProcessor

Handler = Callable[[httpx.Request], httpx.Response]

ANSWER = {
    "text": "Hello",
    "output_ids": [1],
    "meta_info": {"id": "r1", "finish_reason": {"type": "length", "length": 1}},
}
CHAT_ANSWER = {"id": "c1", "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}
COMPLETION = {"id": "c1", "choices": [{"index": 0, "text": "Hi", "finish_reason": "stop"}]}
DIGEST = "sha256:" + "0" * 64
DETAILS = ProcessorDetails(
    id="P@2",
    kind="registered",
    name="P",
    version=2,
    digest=DIGEST,
    params_schema={"type": "object"},
    form="source",
    size=9,
    created=1,
    source="class P: ...",
    class_name="P",
)


class FakeServer:
    """Fake server with a list of prepared responses, which records its requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def bodies(self) -> list[Any]:
        return [orjson.loads(request.content) for request in self.requests]


class AnyClient:
    """Caller of a method of a sync or async client, which collects streams."""

    dialect: ServerKind = "logitship"

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.slept: list[float] = []

    def __call__(self, handler: Handler, method: str, *args: Any, max_retries: int = 2, **kwargs: Any) -> Any:
        transport = httpx.MockTransport(handler)
        if not self.asynchronous:
            with Client(
                "http://server",
                dialect=self.dialect,
                transport=transport,
                max_retries=max_retries,
                sleep=self.slept.append,
            ) as client:
                result = getattr(client, method)(*args, **kwargs)
                return list(result) if inspect.isgenerator(result) else result
        return asyncio.run(self._call_async(transport, method, args, max_retries, kwargs))

    async def _call_async(
        self, transport: httpx.MockTransport, method: str, args: Any, max_retries: int, kwargs: Any
    ) -> Any:
        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        async with AsyncClient(
            "http://server", dialect=self.dialect, transport=transport, max_retries=max_retries, sleep=sleep
        ) as client:
            result = getattr(client, method)(*args, **kwargs)
            return [chunk async for chunk in result] if inspect.isasyncgen(result) else await result


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> AnyClient:
    return AnyClient(request.param)


def ok(data: Any) -> httpx.Response:
    return httpx.Response(200, json=data)


def stream_of(*events: Any, done: bool = True) -> httpx.Response:
    text = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    return httpx.Response(200, content=text + (b"data: [DONE]\n\n" if done else b""))


def test_generate(call: AnyClient) -> None:
    server = FakeServer(ok(ANSWER))
    generation = call(server, "generate", "Hi", processor="min_p", params={"min_p": 0.1}, max_new_tokens=1)
    assert isinstance(generation, Generation)
    assert (generation.text, generation.rid) == ("Hello", "r1")
    assert (server.requests[0].method, str(server.requests[0].url)) == ("POST", "http://server/generate")
    assert server.requests[0].headers["content-type"] == "application/json"
    assert server.bodies == [
        {
            "text": "Hi",
            "stream": False,
            "sampling_params": {"max_new_tokens": 1, "custom_params": {"min_p": 0.1}},
            "custom_logit_processor": '{"name":"min_p"}',
        }
    ]


def test_batch_and_n_return_lists(call: AnyClient) -> None:
    server = FakeServer(ok([ANSWER, ANSWER]), ok([ANSWER, ANSWER]), ok(COMPLETION), ok(CHAT_ANSWER))
    assert len(call(server, "generate", ["a", "b"])) == 2
    assert len(call(server, "generate", "a", n=2)) == 2
    assert len(call(server, "completions", "a", n=1)) == 1
    assert len(call(server, "chat", [{"role": "user", "content": "a"}], n=1)) == 1


def test_openai_routes(call: AnyClient) -> None:
    server = FakeServer(ok(COMPLETION), ok(CHAT_ANSWER))
    assert call(server, "completions", "a").text == "Hi"
    assert call(server, "chat", [{"role": "user", "content": "a"}]).text == "Hi"
    assert [request.url.path for request in server.requests] == ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("method", "prompt", "event"),
    [
        ("generate_stream", "a", ANSWER),
        ("completions_stream", "a", COMPLETION),
        (
            "chat_stream",
            [{"role": "user", "content": "a"}],
            {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]},
        ),
    ],
)
def test_streams(call: AnyClient, method: str, prompt: Any, event: dict[str, Any]) -> None:
    server = FakeServer(stream_of(event))
    (chunk,) = call(server, method, prompt)
    assert isinstance(chunk, GenerationChunk)
    assert chunk.text == chunk.cumulative_text == event.get("text", "Hi")
    assert server.bodies[0]["stream"] is True
    assert server.requests[0].headers["accept"] == "text/event-stream"


def test_other_methods(call: AnyClient) -> None:
    server = FakeServer(
        ok({"data": [{"id": "m"}]}),
        ok({"model_path": "m"}),
        ok({"version": "1"}),
        httpx.Response(200),
        httpx.Response(200),
        httpx.Response(200, text="Cache flushed."),
        ok({"digest": DIGEST, "name": "P"}),
        ok({"digest": DIGEST, "name": "Q", "id": "Q@3"}),
        ok({"data": [{"name": "ban", "description": "Bans.", "params_schema": {}, "is_mask": True}]}),
        ok({"object": "processor", **asdict(DETAILS)}),
        ok({"id": "P@2", "object": "processor", "deleted": True, "ids": ["P@2"]}),
    )
    assert [model.id for model in call(server, "models")] == ["m"]
    assert call(server, "model_info") == {"model_path": "m"}
    assert call(server, "server_info") == {"version": "1"}
    call(server, "abort", "r1")
    call(server, "abort_all")
    call(server, "flush_cache")
    assert call(server, "register", "min_p") == RegisteredProcessor(DIGEST)
    assert call(server, "register", "min_p", name="Q").id == "Q@3"
    ban = ProcessorInfo(id="ban", kind="installed", name="ban", description="Bans.", params_schema={}, is_mask=True)
    assert call(server, "processors") == [ban]
    assert call(server, "processor", "P@2") == DETAILS
    assert call(server, "delete_processor", RegisteredProcessor(DIGEST, "P@2")) == ["P@2"]
    assert [(request.method, request.url.path) for request in server.requests] == [
        ("GET", "/v1/models"),
        ("GET", "/get_model_info"),
        ("GET", "/server_info"),
        ("POST", "/abort_request"),
        ("POST", "/abort_request"),
        ("POST", "/flush_cache"),
        ("POST", "/v1/processors"),
        ("POST", "/v1/processors"),
        ("GET", "/v1/processors"),
        ("GET", "/v1/processors/P@2"),
        ("DELETE", "/v1/processors/P@2"),
    ]
    assert server.requests[7].url.query == b"name=Q"


WEIGHTS = torch.arange(16384.0)
"""64 KiB."""


class Weighs(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + WEIGHTS[0]


class WeighsToo(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits - WEIGHTS[1]


class ArtifactServer:
    """Keeps artifacts, if it knows them, and registers processors. Records what was sent."""

    def __init__(self, *, has_artifacts: bool) -> None:
        self.artifacts: set[str] | None = set() if has_artifacts else None
        self.sent: list[tuple[str, str, int]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.sent.append((request.method, path, len(request.content)))
        if path == "/v1/processors":
            form = orjson.loads(request.content)
            needed = form["logitship"].get("artifacts", [])
            assert self.artifacts is not None or not needed
            assert set(needed) <= (self.artifacts or set())
            return ok({"digest": DIGEST, "name": "P"})
        if self.artifacts is not None and request.method == "POST":
            assert request.headers["content-type"] == "application/octet-stream"
            self.artifacts.add(digest_of(request.content))
            return ok({"digest": digest_of(request.content)})
        if self.artifacts is not None and path.removeprefix("/v1/artifacts/") in self.artifacts:
            return ok({})
        return httpx.Response(404, json={"error": {"message": "no"}})


def test_register_uploads_tensors_once(call: AnyClient) -> None:
    server = ArtifactServer(has_artifacts=True)
    digest = digest_of(raw_bytes(WEIGHTS))
    for cls in (Weighs, WeighsToo, Weighs):
        call(server, "register", cls)
    uploads = [size for method, path, size in server.sent if (method, path) == ("POST", "/v1/artifacts")]
    assert uploads == [65536]
    assert server.artifacts == {digest}
    assert all(size < 6000 for _, path, size in server.sent if path == "/v1/processors")
    assert call(server, "upload_artifact", WEIGHTS) == digest
    assert call(server, "upload_artifact", b"other") == digest_of(b"other")


def test_register_at_a_server_without_artifacts_sends_the_bytes(call: AnyClient) -> None:
    server = ArtifactServer(has_artifacts=False)
    assert call(server, "register", Weighs).digest == DIGEST
    assert server.sent[-1][1] == "/v1/processors"
    assert 2 * 65536 < server.sent[-1][2] < 2 * 65536 + 6000


def test_health_does_not_raise_or_retry(call: AnyClient) -> None:
    server = FakeServer(httpx.Response(200), httpx.Response(503), httpx.ConnectError("refused"))
    assert [call(server, "health") for _ in range(3)] == [True, False, False]
    assert call.slept == []


def test_error_status_raises_its_class(call: AnyClient) -> None:
    server = FakeServer(httpx.Response(400, json={"error": {"message": "n must be 1", "param": "n"}}))
    with pytest.raises(BadRequestError, match="400: n must be 1") as caught:
        call(server, "generate", "Hi")
    assert caught.value.param == "n"


def test_error_status_of_stream_raises_its_class(call: AnyClient) -> None:
    server = FakeServer(httpx.Response(401, json={"error": {"message": "no key"}}))
    with pytest.raises(AuthenticationError, match="no key"):
        call(server, "generate_stream", "Hi")


def test_invalid_argument_raises_before_sending() -> None:
    server = FakeServer()
    client = Client(dialect="logitship", transport=httpx.MockTransport(server))
    asynchronous = AsyncClient(dialect="logitship", transport=httpx.MockTransport(server))
    for stream in (client.generate_stream, client.completions_stream, asynchronous.generate_stream):
        with pytest.raises(ValueError, match="prompt"):
            stream("")
    assert server.requests == []


def test_retry_after_is_respected(call: AnyClient) -> None:
    busy = httpx.Response(429, headers={"retry-after": "3"}, json={"error": {"message": "full"}})
    server = FakeServer(busy, httpx.Response(503), ok(ANSWER))
    assert call(server, "generate", "Hi").text == "Hello"
    assert call.slept[0] == 3.0
    assert 0.5 <= call.slept[1] <= 1.0
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]


def test_retries_are_limited(call: AnyClient) -> None:
    server = FakeServer(*[httpx.Response(503, json={"error": {"message": "full"}})] * 3)
    with pytest.raises(ServerBusyError, match="full"):
        call(server, "generate_stream", "Hi")
    assert len(server.requests) == 3


def test_no_retries(call: AnyClient) -> None:
    with pytest.raises(ServerBusyError):
        call(FakeServer(httpx.Response(503)), "models", max_retries=0)
    assert call.slept == []


def test_refused_connection_is_retried(call: AnyClient) -> None:
    server = FakeServer(httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), ok(ANSWER))
    assert call(server, "generate", "Hi").text == "Hello"
    assert len(call.slept) == 2


@pytest.mark.parametrize(
    "error", [httpx.ReadError("reset"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("gone")]
)
def test_broken_generation_is_not_retried(call: AnyClient, error: httpx.HTTPError) -> None:
    server = FakeServer(error)
    with pytest.raises(TransportError, match="http://server") as caught:
        call(server, "generate", "Hi")
    assert caught.value.__cause__ is error
    assert len(server.requests) == 1


def test_idempotent_request_is_retried(call: AnyClient) -> None:
    server = FakeServer(httpx.ReadError("reset"), httpx.Response(504), ok({"data": []}))
    assert call(server, "models") == []


def test_httpx_errors_become_transport_errors(call: AnyClient) -> None:
    for error in (httpx.ConnectError(""), httpx.ReadError(""), httpx.WriteTimeout(""), httpx.UnsupportedProtocol("x")):
        with pytest.raises(TransportError):
            call(FakeServer(error), "generate", "Hi", max_retries=0)


def test_truncated_stream_is_not_restarted(call: AnyClient) -> None:
    server = FakeServer(stream_of(ANSWER, done=False))
    with pytest.raises(TransportError, match="middle of the stream"):
        call(server, "generate_stream", "Hi")
    assert len(server.requests) == 1


class BreakingStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Body that breaks after its first piece or never ends, and records whether it was closed."""

    def __init__(self, breaks: bool) -> None:
        self.breaks = breaks
        self.closed = False

    def _pieces(self) -> Iterator[bytes]:
        yield b"data: " + orjson.dumps(ANSWER) + b"\n\n"
        if self.breaks:
            raise httpx.ReadError("reset")
        while True:
            yield b": still here\n\ndata: " + orjson.dumps(ANSWER) + b"\n\n"

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces():
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def test_connection_breaks_during_stream(call: AnyClient) -> None:
    body = BreakingStream(breaks=True)
    server = FakeServer(httpx.Response(200, stream=body))
    with pytest.raises(TransportError, match="reset"):
        call(server, "generate_stream", "Hi")
    assert body.closed
    assert len(server.requests) == 1


def test_closing_iterator_closes_connection() -> None:
    body = BreakingStream(breaks=False)
    client = Client(dialect="logitship", transport=httpx.MockTransport(FakeServer(httpx.Response(200, stream=body))))
    with closing(client.generate_stream("Hi")) as chunks:
        assert next(chunks).text == "Hello"
        assert not body.closed
    assert body.closed


def test_closing_async_iterator_closes_connection() -> None:
    async def run() -> None:
        body = BreakingStream(breaks=False)
        client = AsyncClient(
            dialect="logitship", transport=httpx.MockTransport(FakeServer(httpx.Response(200, stream=body)))
        )
        async with aclosing(client.generate_stream("Hi")) as chunks:
            assert (await anext(chunks)).text == "Hello"
            assert not body.closed
        assert body.closed

    asyncio.run(run())


def test_error_in_stream(call: AnyClient) -> None:
    server = FakeServer(
        stream_of(ANSWER, {"error": {"message": "boom", "type": "ProcessorFault", "traceback": "Trace"}})
    )
    with pytest.raises(GenerationError, match="boom") as caught:
        call(server, "generate_stream", "Hi")
    assert caught.value.traceback == "Trace"
    assert caught.value.partial.cumulative_text == "Hello"


def test_api_key_and_headers_are_sent() -> None:
    server = FakeServer(ok(ANSWER))
    client = Client(
        "http://server/prefix/",
        dialect="logitship",
        api_key="k",
        headers={"x-tenant": "t"},
        transport=httpx.MockTransport(server),
    )
    client.generate("Hi")
    assert server.requests[0].headers["authorization"] == "Bearer k"
    assert server.requests[0].headers["x-tenant"] == "t"
    assert server.requests[0].url.path == "/prefix/generate"


def test_api_key_is_sent_as_utf8() -> None:
    server = FakeServer(ok(ANSWER))
    Client(dialect="logitship", api_key="ké€", transport=httpx.MockTransport(server)).generate("Hi")
    assert (b"authorization", "Bearer ké€".encode()) in server.requests[0].headers.raw


def test_authorization_header_replaces_the_api_key() -> None:
    server = FakeServer(ok(ANSWER))
    headers = {"Authorization": "Bearer mine"}
    client = Client(dialect="logitship", api_key="k", headers=headers, transport=httpx.MockTransport(server))
    client.generate("Hi")
    assert server.requests[0].headers.get_list("authorization") == ["Bearer mine"]


@pytest.mark.parametrize("base_url", ["127.0.0.1:30000", "ftp://server", "http://", "", "http://server:port"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_invalid_base_url(kind: type[Client] | type[AsyncClient], base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        kind(base_url)


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and not name.startswith("__")
        }

    assert signatures(Client) == signatures(AsyncClient)


def test_concurrent_requests_share_client() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        return ok({**ANSWER, "text": orjson.loads(request.content)["text"]})

    async def run() -> list[Generation]:
        async with AsyncClient(dialect="logitship", transport=httpx.MockTransport(handler)) as client:
            calls: list[Awaitable[Generation]] = [client.generate(f"prompt {i}") for i in range(50)]
            return await asyncio.gather(*calls)

    assert [generation.text for generation in asyncio.run(run())] == [f"prompt {i}" for i in range(50)]
