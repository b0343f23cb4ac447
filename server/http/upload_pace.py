"""The pace at which bodies are received: a tenant that uploads without end leaves the event loop to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

RATE = 16 << 20
"""Bytes per second that a tenant may upload for long. To receive that much takes a few percent of a core."""

BURST = 32 << 20
"""Bytes that a tenant may upload at once before."""


class UploadPace:
    """Computes how long to wait before more of a tenant's bodies is received (a leaky bucket).

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        """Tenant → (bytes in its bucket, at this time)."""

    def delay(self, tenant: str, size: int) -> float:
        """Count received bytes. Returns the seconds to wait before more is received."""
        now = self._clock()
        level, at = self._levels.get(tenant, (0.0, now))
        level = max(0.0, level - (now - at) * RATE) + size
        self._levels[tenant] = level, now
        return max(0.0, (level - BURST) / RATE)


class UploadPaceMiddleware:
    """Delays the bodies of callers that upload too fast. Bodies without a caller have no reader.

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
