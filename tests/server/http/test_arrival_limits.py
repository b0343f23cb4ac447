from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from logitship.server.http.arrival_limits import BURST, RATE, UploadPace, UploadPaceMiddleware, head_timeout_protocol
from logitship.server.http.auth import Caller

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


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_silent_connection_is_closed() -> None:
    async def scenario() -> None:
        connection = Connection(AT_ONCE)
        await connection.closed.wait()
        assert connection.written == b""

    run(scenario)


@pytest.mark.parametrize("pieces", [[HALF], [HALF[:5], HALF[5:]]], ids=["once", "in pieces"])
def test_connection_with_half_a_head_gets_408(pieces: list[bytes]) -> None:
    async def scenario() -> None:
        connection = Connection(AT_ONCE)
        for piece in pieces:
            connection.receive(piece)
        await connection.closed.wait()
        head, _, body = connection.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"Content-Length: %d" % len(body) in head
        assert b"--request-body-timeout" in body

    run(scenario)


def test_bytes_do_not_extend_the_time() -> None:
    async def scenario() -> None:
        connection = Connection(NEVER)
        (timer,) = timers(connection)
        connection.receive(HALF[:5])
        connection.receive(HALF[5:])
        assert timers(connection) == [timer]
        connection.receive(OTHER_HALF)
        assert timer.cancelled()
        connection.protocol.connection_lost(None)

    run(scenario)


def timers(connection: Connection) -> list[asyncio.TimerHandle]:
    timer = connection.protocol._timer
    return [] if timer is None else [timer]


def test_running_request_is_not_limited() -> None:
    async def scenario() -> None:
        connection = Connection(AT_ONCE)
        connection.receive(REQUEST)
        await ticks()
        assert not connection.closed.is_set()
        await connection.answered()
        connection.protocol.connection_lost(None)

    run(scenario)


def test_kept_connection_is_limited_from_the_first_byte_of_the_next_head() -> None:
    async def scenario() -> None:
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

    run(scenario)


def test_lost_connection_is_not_closed_again() -> None:
    async def scenario() -> None:
        connection = Connection(AT_ONCE)
        connection.receive(HALF)
        connection.protocol.connection_lost(ConnectionResetError())
        await ticks()
        assert not connection.closed.is_set()
        assert connection.written == b""

    run(scenario)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_long_uploads_have_the_rate() -> None:
    clock = FakeClock()
    pace = UploadPace(clock)
    assert pace.delay("a", BURST) == 0.0
    for _ in range(10):
        delay = pace.delay("a", RATE // 4)
        assert delay == pytest.approx(0.25)
        clock.now += delay


def test_tenants_have_paces_of_their_own() -> None:
    pace = UploadPace(FakeClock())
    assert pace.delay("a", BURST + RATE) == 1.0
    assert pace.delay("b", BURST) == 0.0


def test_a_pause_permits_another_burst() -> None:
    clock = FakeClock()
    pace = UploadPace(clock)
    assert pace.delay("a", BURST + RATE) == 1.0
    clock.now += 1000.0
    assert pace.delay("a", BURST) == 0.0


@pytest.mark.parametrize(("caller", "slept"), [(Caller("a", may_ship=False), [1.0, 2.0]), (None, [])])
def test_middleware_delays_what_is_received(caller: Caller | None, slept: list[float]) -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    bodies = [b"x" * (BURST + RATE), b"y" * RATE, b""]
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": bool(body)} for body in bodies]
    messages.append({"type": "http.disconnect"})
    received: list[Any] = []

    async def receive() -> Any:
        return messages[len(received)]

    async def send(message: Any) -> None:
        raise AssertionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while len(received) < 4:
            received.append(await receive())

    middleware = UploadPaceMiddleware(app, UploadPace(FakeClock()), sleep)
    asyncio.run(middleware({"type": "http", "state": {"caller": caller}}, receive, send))
    assert received == messages
    assert delays == slept
