"""The pace of a caller's uploads, and of the beginnings of its requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from logitship.server.api_keys import Caller
from logitship.server.http.pacing import (
    _MAX_TURN_PAUSE,
    _REFUSAL_PAUSE,
    SHARED_UPLOAD_RATE,
    UPLOAD_BURST,
    UPLOAD_RATE,
    TurnsMiddleware,
    UploadPace,
    UploadPaceMiddleware,
)
from tests.helpers.clock import Clock


def none_run(tenant: str) -> bool:
    return False


@pytest.mark.parametrize(("others_run", "rate"), [(False, UPLOAD_RATE), (True, SHARED_UPLOAD_RATE)])
def test_long_uploads_have_the_rate(others_run: bool, rate: int) -> None:
    clock = Clock()
    pace = UploadPace(lambda tenant: others_run, clock)
    assert pace.delay("a", UPLOAD_BURST) == 0.0
    for _ in range(10):
        delay = pace.delay("a", rate // 4)
        assert delay == pytest.approx(0.25)
        clock.now += delay


def test_tenants_have_paces_of_their_own() -> None:
    pace = UploadPace(none_run, Clock())
    assert pace.delay("a", UPLOAD_BURST + UPLOAD_RATE) == 1.0
    assert pace.delay("b", UPLOAD_BURST) == 0.0


def test_a_pause_permits_another_burst() -> None:
    clock = Clock()
    pace = UploadPace(none_run, clock)
    assert pace.delay("a", UPLOAD_BURST + UPLOAD_RATE) == 1.0
    clock.now += 1000.0
    assert pace.delay("a", UPLOAD_BURST) == 0.0


@pytest.mark.parametrize(("caller", "slept"), [(Caller("a", may_ship=False), [1.0, 2.0]), (None, [])])
def test_middleware_delays_what_is_received(caller: Caller | None, slept: list[float]) -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    bodies = [b"x" * (UPLOAD_BURST + UPLOAD_RATE), b"y" * UPLOAD_RATE, b""]
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

    middleware = UploadPaceMiddleware(app, UploadPace(none_run, Clock()), sleep)
    asyncio.run(middleware({"type": "http", "state": {"caller": caller}}, receive, send))
    assert received == messages
    assert delays == slept


async def test_turns_of_a_burst_leave_others_ahead() -> None:
    """A request that arrives behind a hundred of another tenant begins before nearly all of them."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["state"]["caller"].tenant)

    middleware = TurnsMiddleware(app, others_run=lambda tenant: False)
    tenants = ["a"] * 100 + ["b"]
    scopes = [{"type": "http", "state": {"caller": Caller(tenant, may_ship=False)}} for tenant in tenants]
    await asyncio.gather(*(middleware(scope, None, None) for scope in scopes))  # type: ignore[arg-type]
    assert len(begun) == 101
    assert begun.index("b") <= 2


async def test_a_request_that_leaves_while_it_waits_has_no_turn() -> None:
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    middleware = TurnsMiddleware(app, others_run=lambda tenant: False)
    caller = Caller("a", may_ship=False)
    scopes = [{"type": "http", "path": path, "state": {"caller": caller}} for path in "12345"]
    tasks = [asyncio.ensure_future(middleware(scope, None, None)) for scope in scopes]  # type: ignore[arg-type]
    await tasks[0]
    tasks[1].cancel()
    await tasks[2]
    tasks[3].cancel()  # its turn has begun, but it does not know yet
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == ["1", "3", "5"]


async def test_requests_without_a_caller_have_no_turn() -> None:
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])

    middleware = TurnsMiddleware(app, others_run=lambda tenant: True)
    health = middleware({"type": "http", "path": "/health", "state": {}}, None, None)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        health.send(None)  # without a wait
    assert begun == ["/health"]


async def test_turns_are_followed_by_a_pause_while_others_run() -> None:
    begun: list[str] = []
    pauses: list[float] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["state"]["caller"].tenant)
        time.sleep(0.01)

    middleware = TurnsMiddleware(app, others_run=lambda tenant: tenant == "a")
    loop = asyncio.get_running_loop()
    ends: list[Any] = []

    def call_later(delay: float, callback: Any, *args: Any) -> None:
        pauses.append(delay)
        ends.append(lambda: callback(*args))

    loop.call_later = call_later  # type: ignore[assignment]
    scopes = [{"type": "http", "state": {"caller": Caller(tenant, may_ship=False)}} for tenant in "aabb"]
    tasks = [asyncio.ensure_future(middleware(scope, None, None)) for scope in scopes]  # type: ignore[arg-type]
    await asyncio.gather(tasks[0], *tasks[2:])
    assert begun == ["a", "b", "b"]
    ends.pop()()
    await tasks[1]
    assert begun == ["a", "b", "b", "a"]
    assert pauses == [_MAX_TURN_PAUSE] * len(pauses)  # ten times as long as its beginning, else


@pytest.mark.parametrize(
    ("status", "others_run", "pauses"),
    [(429, True, 1), (429, False, 0), (400, True, 1), (413, True, 1), (404, True, 0), (200, True, 0)],
)
async def test_refusals_are_followed_by_a_pause(status: int, others_run: bool, pauses: int) -> None:
    slept: list[float] = []
    sent: list[Any] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": b""})

    middleware = TurnsMiddleware(app, lambda tenant: others_run, sleep)
    for tenant in ("refused", "another", "refused"):
        scope = {"type": "http", "state": {"caller": Caller(tenant, may_ship=False)}}
        await middleware(scope, None, send)  # type: ignore[arg-type]
    assert [0 < seconds <= _REFUSAL_PAUSE for seconds in slept] == [True] * pauses
    assert len(sent) == 6


async def test_a_client_that_leaves_in_the_pause_ends_its_turn() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429})

    async def send(message: Any) -> None:
        pass

    middleware = TurnsMiddleware(app, others_run=lambda tenant: True)
    scope = {"type": "http", "state": {"caller": Caller("a", may_ship=False)}}
    await middleware(scope, None, send)  # type: ignore[arg-type]
    leaves = asyncio.ensure_future(middleware(scope, None, send))  # type: ignore[arg-type]
    while not middleware._refused_at:
        await asyncio.sleep(0)
    while middleware._refused_at:  # its pause begins
        await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert leaves.cancelled()
    await middleware(scope, None, send)  # type: ignore[arg-type]
