"""Limits on how requests arrive: the time for the head of a request, and the pace of the bodies.

`received_body` limits the time and the size of each body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # what `AutoHTTPProtocol` may be
else:
    Protocol = AutoHTTPProtocol

RATE = 16 << 20
"""Bytes per second that a tenant may upload for long. To receive that much takes a few percent of a core."""

BURST = 32 << 20
"""Bytes that a tenant may upload at once before."""

_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)


class HeadTimeoutProtocol(Protocol):
    """Closes connections whose next request does not begin in time.

    The time starts when the connection is made, and for later requests with their first byte. Uvicorn limits the time
    in between (`timeout_keep_alive`), and `received_body` that for a body.
    """

    head_timeout: float
    """Seconds for the head of a request."""
    _timer: asyncio.TimerHandle | None = None
    _has_data = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Start the time with the first byte of a head, and stop it with the last one."""
        self._has_data = True
        super().data_received(data)
        if self._has_request:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _has_request(self) -> bool:
        """True from the end of a request's head to the end of its response."""
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout, self._end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # upgraded to a WebSocket
            return
        if self._has_data:
            reason = (
                f"the headers of the request did not arrive within {self.head_timeout:g} seconds "
                "(--request-body-timeout): send them faster"
            ).encode()
            self.transport.write(_RESPONSE % (len(reason), reason))
        self.transport.close()


def head_timeout_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol class of a server with this time limit."""

    class LimitedProtocol(HeadTimeoutProtocol):
        head_timeout = seconds

    return LimitedProtocol


class UploadPace:
    """Computes how long to wait before more of a tenant's bodies is received (a leaky bucket).

    A tenant that uploads without end leaves the event loop to the others.

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
