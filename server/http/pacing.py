"""The pace of a caller's requests: how fast its uploads are received, and how fast its requests begin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from starlette.status import HTTP_400_BAD_REQUEST, HTTP_413_CONTENT_TOO_LARGE, HTTP_429_TOO_MANY_REQUESTS
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UPLOAD_RATE = 16 << 20
"""Sustained upload rate of a tenant, in bytes per second. To receive that much takes a few percent of a core."""

SHARED_UPLOAD_RATE = 8 << 20
"""The same while other tenants run. Bodies of many short strings take a quarter of a core at this rate, and a forward
pass waits for its slowest thread."""

UPLOAD_BURST = 4 << 20
"""Bytes that a tenant may upload before it is slowed down."""

_TURN_PAUSE = 10.0
"""Pause after a request has begun, as a multiple of the event loop's time for that. The loop has about as much to do
for the remainder of the request."""

_MAX_TURN_PAUSE = 0.05
"""Seconds: the event loop may have been busy with other requests."""

_REFUSALS = (HTTP_400_BAD_REQUEST, HTTP_413_CONTENT_TOO_LARGE, HTTP_429_TOO_MANY_REQUESTS)
_REFUSAL_PAUSE = 0.1
"""Seconds after a refusal until the next request of the tenant begins. The refusal of a large body takes several
milliseconds, and a client that does not heed it sends the body again at once."""


class UploadPace:
    """Computes how long to wait before more of a tenant's bodies is received (a leaky bucket).

    A tenant that never stops uploading still leaves most of the event loop and of the cores to others.

    Args:
        others_run: returns whether sequences of other tenants than this one run.
        clock: returns seconds.
    """

    def __init__(self, others_run: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._others_run = others_run
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        """Tenant → (bytes in its bucket, at this time)."""

    def delay(self, tenant: str, size: int) -> float:
        """Count received bytes. Returns the seconds to wait before more is received."""
        now = self._clock()
        rate = SHARED_UPLOAD_RATE if self._others_run(tenant) else UPLOAD_RATE
        level, at = self._levels.get(tenant, (0.0, now))
        level = max(0.0, level - (now - at) * rate) + size
        self._levels[tenant] = level, now
        return max(0.0, (level - UPLOAD_BURST) / rate)


class UploadPaceMiddleware:
    """Delays the bodies of callers that upload too fast. Nothing reads bodies of requests without a caller.

    While nothing receives a body, its connection is not read either, and TCP makes the client wait.

    Args:
        app: the application.
        pace: the pace of all requests.
        sleep: waits this many seconds.
    """

    def __init__(
        self, app: ASGIApp, pace: UploadPace, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._app = app
        self._pace = pace
        self._sleep = sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request."""
        caller = scope.get("state", {}).get("caller")
        if caller is None:
            await self._app(scope, receive, send)
            return

        async def paced() -> Message:
            message = await receive()
            if (body := message.get("body")) and (delay := self._pace.delay(caller.tenant, len(body))):
                await self._sleep(delay)
            return message

        await self._app(scope, paced, send)


class TurnsMiddleware:
    """Lets the requests of each caller begin one after the other, with a pause in between if others would wait.

    The event loop calls what is ready in order of arrival. Without turns, a request that arrives after two hundred of
    another caller would wait a second until all of those have been parsed and submitted, which would also slow down all
    steps meanwhile: the loop takes the GIL and a core. Refused requests are followed by a longer pause.

    Args:
        app: the application.
        others_run: returns whether sequences of other callers than this tenant run.
        sleep: waits this many seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        others_run: Callable[[str], bool],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._app = app
        self._others_run = others_run
        self._sleep = sleep
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._refused_at: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request. Those without a caller have no turn."""
        caller = scope.get("state", {}).get("caller")
        if caller is None:
            await self._app(scope, receive, send)
            return
        tenant = caller.tenant
        loop = asyncio.get_running_loop()

        async def watched(message: Message) -> None:
            if message.get("status") in _REFUSALS:
                self._refused_at[tenant] = loop.time()
            await send(message)

        turn = self._turns.setdefault(tenant, asyncio.Lock())
        await turn.acquire()
        try:
            await self._pause_after_refusal(tenant)
        except BaseException:  # cleanup, then re-raised
            turn.release()
            raise
        loop.call_soon(self._end, turn, tenant, loop.time())
        await self._app(scope, receive, watched)

    async def _pause_after_refusal(self, tenant: str) -> None:
        refused_at = self._refused_at.pop(tenant, None)
        if refused_at is not None and self._others_run(tenant):
            await self._sleep(refused_at + _REFUSAL_PAUSE - asyncio.get_running_loop().time())

    def _end(self, turn: asyncio.Lock, tenant: str, began: float) -> None:
        loop = asyncio.get_running_loop()
        if self._others_run(tenant):
            pause = min(_MAX_TURN_PAUSE, _TURN_PAUSE * (loop.time() - began))
            loop.call_later(pause, turn.release)
        else:
            turn.release()
