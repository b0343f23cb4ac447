"""Receiving requests within bounds: the head of a request in time, a JSON body in time, bytes and elements."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from fastapi import Request
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, RequestTooLarge
from logitship.server.requests.body_limits import BYTES_PER_ELEMENT, MAX_DEPTH, QueuedBody, scan_json
from logitship.server.schemas.request_schema import IgnoredFields, Model, parse_model
from logitship.server.uploads.request_bodies import ReceivedBody, RequestWork, received_body

from .request_log import note_ignored

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol  # what `AutoHTTPProtocol` may be
else:
    Protocol = AutoHTTPProtocol

_HEAD_TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)


class HeadTimeoutProtocol(Protocol):
    """Closes connections whose next request does not begin in time.

    The time starts when the connection is made, and for later requests with their first byte. Uvicorn limits the time
    in between (`timeout_keep_alive`), and `received` that for a body.
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
            self.transport.write(_HEAD_TIMEOUT_RESPONSE % (len(reason), reason))
        self.transport.close()


def head_timeout_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol class of a server with this time limit."""

    class LimitedProtocol(HeadTimeoutProtocol):
        head_timeout = seconds

    return LimitedProtocol


T = TypeVar("T")


@asynccontextmanager
async def received(request: Request, engine: AsyncEngine, model: type[Model]) -> AsyncIterator[ReceivedBody[Model]]:
    """Receive and validate a JSON body.

    In the block, its bytes are counted, and a client that disconnects cancels what is awaited.

    Args:
        request: the request.
        engine: has the limits, and counts the bytes.
        model: the schema of its body.

    Raises:
        BadRequest: the body is not JSON, nests too deeply, or does not match the schema.
        RequestTooLarge: it has too many bytes, or keys and values.
        RequestTimeout: it took too long to arrive.
        QueueFull: too many bytes wait already.
        ClientDisconnect: the client disconnected.
    """
    ignored: IgnoredFields = set()
    note_ignored(ignored)
    async with received_json(request, engine, partial(parse_model, model, ignored=ignored)) as body:
        yield replace(body, ignored=ignored)


@asynccontextmanager
async def received_json(
    request: Request, engine: AsyncEngine, parse: Callable[[Any], T]
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive a JSON body, and parse what was decoded: as `received`."""

    async def decode(raw: bytes, work: RequestWork, queued: QueuedBody) -> T:
        data = await _decode(raw, work, queued, engine.config.max_request_elements)
        return await work.run_if_large(parse, data)

    async with received_body(request, engine, engine.config.max_request_bytes, decode) as body:
        yield body


async def _decode(raw: bytes, work: RequestWork, queued: QueuedBody, max_elements: int) -> Any:
    scan = await work.run_if_large(scan_json, raw, max_elements)
    if scan.elements > max_elements:
        raise RequestTooLarge(
            f"the request body has more than {max_elements} keys and values (a string counts as 2, a key, a list or an "
            "object as 4), the most that this server takes (--max-request-elements): send them in several requests"
        )
    if scan.max_depth > MAX_DEPTH:
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    queued.add(BYTES_PER_ELEMENT * scan.elements)  # before they exist
    queued.depth = scan.max_depth
    return await work.run_if_large(_loads, raw)


def _loads(raw: bytes) -> Any:
    # Python's garbage collector would run hundreds of times in between, and take five times as long as orjson itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not JSON: {error}") from None
    finally:
        if collecting:
            gc.enable()
