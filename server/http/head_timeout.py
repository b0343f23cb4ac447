"""A time limit for the head of a request: its first line and its headers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # what `AutoHTTPProtocol` may be
else:
    Protocol = AutoHTTPProtocol

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
