"""Requests at the level of bytes and ASGI messages: slow, large, cut off, and clients that leave."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import orjson
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from logitship.server.http import receiving
from logitship.server.http.app import create_app
from logitship.server.http.receiving import head_timeout_protocol
from logitship.server.schemas.request_schema import parse_model
from logitship.server.uploads.request_bodies import LARGE_BODY, SHORT_TEXT
from tests.helpers.answers import error_of
from tests.helpers.coroutines import until

GENEROUS = 30.0
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request", "/v1/embeddings", "/v1/processors")
LONG_TEXT = "a" * (SHORT_TEXT + 1)


class Upload:
    """An HTTP request whose body arrives piece by piece."""

    def __init__(self, engine: Any, path: str = "/generate", key: str = "") -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[Any] = []
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self.call = asyncio.create_task(create_app(engine)(scope, self._pieces.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def put(self, body: bytes, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Wait for the end. Returns the status, the headers and the JSON body."""
        await asyncio.wait_for(self.call, GENEROUS)
        start, *parts = self.sent
        body = b"".join(part["body"] for part in parts)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, orjson.loads(body) if body else None


@pytest.fixture
def engine(new_engine: Any) -> Any:
    """An engine of the test's own: its pool serves one event loop at a time."""
    return new_engine


@pytest.mark.parametrize("path", PATHS)
async def test_body_that_does_not_arrive_is_refused_with_408(path: str, engine: Any) -> None:
    engine.config = replace(engine.config, request_body_timeout=0.05)
    upload = Upload(engine, path)
    upload.put(b'{"text": "')
    status, headers, body = await upload.answer()
    assert status == 408
    assert headers["connection"] == "close"
    assert body["error"]["type"] == "timeout_error"
    assert "0.05 seconds (--request-body-timeout)" in body["error"]["message"]
    assert engine.queued_bytes.total == 0


async def test_time_to_generate_is_not_bounded_by_the_timeout_of_the_body(engine: Any) -> None:
    engine.config = replace(engine.config, request_body_timeout=0.05)
    engine.hangs = True
    upload = Upload(engine)
    upload.put(b'{"text": "a"}', more=False)
    await until(engine.hung.is_set)
    await asyncio.sleep(0.1)
    assert not upload.call.done()
    upload.disconnect()
    assert (await upload.answer())[0] == 499


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/processors"])
async def test_elements_are_counted_before_they_are_built(
    path: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "orjson", None)
    engine.config = replace(engine.config, max_request_elements=1000)
    upload = Upload(engine, path)
    upload.put(b'{"custom_params": [' + b"1," * 1000, more=False)
    status, _, body = await upload.answer()
    assert status == 413
    assert "1000 keys and values" in body["error"]["message"]
    assert "--max-request-elements" in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        (b'{"text": "%s"}' % (b"a" * LARGE_BODY), 5),  # counted, decoded, parsed, and two parts of the request are made
        (b'{"text": "%s"' % (b"a" * LARGE_BODY), 2),  # no JSON
        (b"[" * LARGE_BODY + b"]", 1),  # refused before it is decoded
        (b'{"text": "a"}', 0),
    ],
)
async def test_work_on_large_bodies_is_done_by_the_pool(
    body: bytes, jobs: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    run_job = engine.pool.run

    async def counted(tenant: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        done.append(function)
        return await run_job(tenant, function, *args, **kwargs)

    monkeypatch.setattr(engine.pool, "run", counted)
    engine.config = replace(engine.config, max_request_bytes=1 << 20)
    upload = Upload(engine)
    upload.put(body, more=False)
    await upload.answer()
    assert len(done) == jobs


def test_processor_strings_are_counted_before_they_are_decoded(shipping_client: Any) -> None:
    text = '{"source": [' + "[]," * 500
    error = error_of(shipping_client.http.post("/v1/processors", content=text))
    assert error["message"].startswith("the request body is not a processor string")
    assert error_of(shipping_client.post("/generate", {"text": "a", "custom_logit_processor": text}))[
        "message"
    ].startswith("custom_logit_processor: is not a processor string")


async def test_bytes_are_counted_as_they_arrive(engine: Any) -> None:
    upload = Upload(engine)
    upload.put(b" " * 1000)
    await until(lambda: engine.queued_bytes.total == 1000)
    upload.put(b" " * 500)
    await until(lambda: engine.queued_bytes.total == 1500)
    upload.disconnect()
    assert (await upload.answer())[0] == 499
    assert engine.queued_bytes.total == 0


async def test_slow_uploads_cannot_fill_the_memory(engine: Any) -> None:
    engine.config = replace(engine.config, max_queued_bytes=1 << 16)
    engine.queued_bytes = type(engine.queued_bytes)(5000, 5000)
    uploads = [Upload(engine) for _ in range(5)]
    for upload in uploads:
        upload.put(b" " * 1000)
    await until(lambda: engine.queued_bytes.total == 5000)
    one_too_many = Upload(engine)
    one_too_many.put(b" " * 1000)
    status, headers, body = await one_too_many.answer()
    assert status == 429
    assert headers["retry-after"] == "1"
    assert "--max-queued-bytes" in body["error"]["message"]
    for upload in uploads:
        upload.disconnect()
        await upload.answer()
    assert engine.queued_bytes.total == 0


async def test_elements_count_as_memory(engine: Any) -> None:
    engine.queued_bytes = type(engine.queued_bytes)(10_000, 10_000)
    upload = Upload(engine)
    upload.put(orjson.orjson.dumps({"text": "a", "sampling_params": {"custom_params": {"a": [1] * 500}}}), more=False)
    status, _, body = await upload.answer()
    assert status == 429
    assert "--max-queued-bytes" in body["error"]["message"]
    assert engine.queued_bytes.total == 0


@pytest.mark.parametrize("size", [100, LARGE_BODY + 1])
async def test_large_bodies_are_parsed_off_the_event_loop(
    size: int, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def parse(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return parse_model(*args, **kwargs)

    monkeypatch.setattr(receiving, "parse_model", parse)
    engine.config = replace(engine.config, max_request_bytes=1 << 20)
    upload = Upload(engine)
    upload.put(b'{"text": "a"}' + b" " * size, more=False)
    assert (await upload.answer())[0] == 200
    (thread,) = threads
    assert (thread is threading.current_thread()) == (size < LARGE_BODY)


@pytest.mark.parametrize(
    ("text", "spaces", "on_event_loop"),
    [("a" * SHORT_TEXT, 0, True), ("a" * (SHORT_TEXT + 1), 0, False), ("a", LARGE_BODY, False)],
    ids=["short", "long", "short in a large body"],
)
async def test_thread_that_tokenizes(engine: Any, text: str, spaces: int, on_event_loop: bool) -> None:
    threads: list[threading.Thread] = []

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    engine.tokenizer.encode = encode
    engine.model = replace(engine.model, max_model_len=SHORT_TEXT)
    engine.config = replace(engine.config, max_request_bytes=1 << 20)
    upload = Upload(engine)
    upload.put(orjson.dumps({"text": text}) + b" " * spaces, more=False)
    assert (await upload.answer())[0] == 200
    (thread,) = threads
    assert (thread is threading.current_thread()) == on_event_loop


async def test_client_that_leaves_frees_its_place_in_the_pool(engine: Any) -> None:
    """The tokenizer is busy with one prompt of the tenant, and its other request waits."""
    gate, busy = threading.Event(), threading.Semaphore(0)

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        busy.release()
        assert gate.wait(GENEROUS)
        return [1]

    engine.tokenizer.encode = encode
    engine.model = replace(engine.model, max_model_len=SHORT_TEXT)
    first, second = Upload(engine), Upload(engine)
    for upload in (first, second):
        upload.put(orjson.dumps({"text": LONG_TEXT}), more=False)
    assert await asyncio.to_thread(busy.acquire, timeout=GENEROUS)
    await until(lambda: engine.pool.num_waiting == 1)
    second.disconnect()
    assert (await second.answer())[0] == 499
    assert engine.pool.num_waiting == 0
    first.disconnect()
    assert (await first.answer())[0] == 499
    gate.set()
    await until(lambda: engine.pool.num_running == 0)
    assert engine.requests == []
    assert engine.queued_bytes.total == 0


async def test_prompts_of_one_tenant_do_not_delay_another(engine: Any) -> None:
    """The tokenizer takes forever for one tenant's prompts, of which ten wait."""
    gate = threading.Event()

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert text.startswith("quick") or gate.wait(GENEROUS)
        return [1]

    engine.tokenizer.encode = encode
    engine.model = replace(engine.model, max_model_len=SHORT_TEXT)
    engine.config = replace(engine.config, api_key=("one", "other"))
    slow = [Upload(engine, key="one") for _ in range(10)]
    for upload in slow:
        upload.put(orjson.dumps({"text": f"slow {LONG_TEXT}"}), more=False)
    await until(lambda: engine.pool.num_waiting == 9)
    quick = Upload(engine, key="other")
    quick.put(orjson.dumps({"text": f"quick {LONG_TEXT}"}), more=False)
    assert (await quick.answer())[0] == 200
    assert not any(upload.call.done() for upload in slow)
    gate.set()
    assert [(await upload.answer())[0] for upload in slow] == [200] * 10


async def test_client_that_leaves_during_admission_cancels_it(engine: Any) -> None:
    cancelled = asyncio.Event()
    admitting = asyncio.Event()

    async def submit(request: Any, body: Any = None) -> Any:
        try:
            admitting.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    engine.submit = submit
    upload = Upload(engine)
    upload.put(b'{"text": "a"}', more=False)
    await admitting.wait()
    upload.disconnect()
    assert (await upload.answer())[0] == 499
    assert cancelled.is_set()
    assert engine.queued_bytes.total == 0


async def test_cancellation_from_outside_is_not_a_disconnect(engine: Any) -> None:
    engine.hangs = True
    upload = Upload(engine)
    upload.put(b'{"text": "a"}', more=False)
    await until(engine.hung.is_set)
    upload.call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload.call
    assert upload.sent == []
    assert len(engine.closed) == 1


REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HALF, OTHER_HALF = REQUEST[:20], REQUEST[20:]
AT_ONCE, NEVER = 0.0, 3600.0


class Connection(asyncio.Transport):
    """A connection to a server whose application answers when it is told to."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()
        self.answer = asyncio.Event()
        config = Config(
            self._app,
            http=head_timeout_protocol(timeout),
            interface="asgi3",
            ws="none",
            log_config=None,
            lifespan="off",
        )
        config.load()
        protocol: Any = config.http_protocol_class
        self.protocol = protocol(config=config, server_state=ServerState(), app_state={})
        self.protocol.connection_made(self)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def get_protocol(self) -> Any:
        return self.protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def receive(self, data: bytes) -> None:
        self.protocol.data_received(data)

    async def answered(self) -> None:
        """Let the application answer, and wait for the response."""
        self.answer.set()
        while not self.written.endswith(b"ok"):
            await asyncio.sleep(0)
        self.answer.clear()


async def ticks() -> None:
    """Let the event loop do whatever is due."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_silent_connection_is_closed() -> None:
    connection = Connection(AT_ONCE)
    await connection.closed.wait()
    assert connection.written == b""


@pytest.mark.parametrize("pieces", [[HALF], [HALF[:5], HALF[5:]]], ids=["once", "in pieces"])
async def test_connection_with_half_a_head_gets_408(pieces: list[bytes]) -> None:
    connection = Connection(AT_ONCE)
    for piece in pieces:
        connection.receive(piece)
    await connection.closed.wait()
    head, _, body = connection.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"Content-Length: %d" % len(body) in head
    assert b"--request-body-timeout" in body


async def test_bytes_do_not_extend_the_time() -> None:
    connection = Connection(NEVER)
    (timer,) = timers(connection)
    connection.receive(HALF[:5])
    connection.receive(HALF[5:])
    assert timers(connection) == [timer]
    connection.receive(OTHER_HALF)
    assert timer.cancelled()
    connection.protocol.connection_lost(None)


def timers(connection: Connection) -> list[asyncio.TimerHandle]:
    timer = connection.protocol._timer
    return [] if timer is None else [timer]


async def test_running_request_is_not_limited() -> None:
    connection = Connection(AT_ONCE)
    connection.receive(REQUEST)
    await ticks()
    assert not connection.closed.is_set()
    await connection.answered()
    connection.protocol.connection_lost(None)


async def test_kept_connection_is_limited_from_the_first_byte_of_the_next_head() -> None:
    connection = Connection(AT_ONCE)
    connection.receive(REQUEST)
    await connection.answered()
    await ticks()
    assert not connection.closed.is_set()
    connection.written = b""
    connection.receive(REQUEST)
    await connection.answered()
    connection.written = b""
    connection.receive(HALF)
    await connection.closed.wait()
    assert connection.written.startswith(b"HTTP/1.1 408 ")


async def test_lost_connection_is_not_closed_again() -> None:
    connection = Connection(AT_ONCE)
    connection.receive(HALF)
    connection.protocol.connection_lost(ConnectionResetError())
    await ticks()
    assert not connection.closed.is_set()
    assert connection.written == b""
