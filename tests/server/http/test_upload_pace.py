from __future__ import annotations

import asyncio
from typing import Any

import pytest

from logitship.server.http.auth import Caller
from logitship.server.http.upload_pace import BURST, RATE, UploadPace, UploadPaceMiddleware


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
