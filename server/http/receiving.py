"""Receiving requests within bounds, and the CPU work that their bodies ask for.

The head of a request is bounded in time, a body in time, bytes and elements. A client that disconnects cancels the
work, too.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from logitship.client.errors import LARGE_PROCESSOR_ADVICE, MAX_PROCESSOR_SIZE_FLAG
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, RequestTimeout, RequestTooLarge
from logitship.server.requests.body_limits import BYTES_PER_ELEMENT, MAX_DEPTH, QueuedBody, scan_json
from logitship.server.requests.fair_pool import FairPool
from logitship.server.schemas.request_schema import IgnoredFields, Model, parse_model

from .auth import caller_of
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


P = ParamSpec("P")
T = TypeVar("T")

LARGE_BODY = 1 << 16
"""Bytes of a body beyond which nothing is done with it on the event loop. Smaller ones take a few milliseconds."""

SHORT_TEXT = 1 << 11
"""Characters of a text up to which it is tokenized on the event loop, which takes up to two milliseconds."""


@dataclass(frozen=True)
class RequestWork:
    """Runs the CPU work of one request before its first step: decoding, validating, tokenizing.

    Attributes:
        pool: the threads that tenants share.
        tenant: who sent the request.
        body_size: bytes of its body.
    """

    pool: FairPool
    tenant: str
    body_size: int

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on a thread.

        Raises:
            QueueFull: too many requests of the tenant wait for that.
        """
        return await self.pool.run(self.tenant, function, *args, **kwargs)

    async def run_if_large(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function whose time depends on the size of the body: on a thread if that is large, else here."""
        if self.body_size <= LARGE_BODY:
            return function(*args, **kwargs)
        return await self.run(function, *args, **kwargs)

    def is_short(self, text: str) -> bool:
        """Return whether a text may be tokenized on the event loop. A large body may have thousands of short texts."""
        return len(text) <= SHORT_TEXT and self.body_size <= LARGE_BODY


@dataclass(frozen=True)
class ReceivedBody(Generic[T]):
    """A parsed body.

    Attributes:
        value: what was parsed.
        work: runs what the body asks for before its first step.
        queued: counts its bytes.
        ignored: names of its fields that were accepted without effect, for a header of the response.
    """

    value: T
    work: RequestWork
    queued: QueuedBody
    ignored: IgnoredFields = field(default_factory=set)


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

    async with _received(request, engine, engine.config.max_request_bytes, decode) as body:
        yield body


@asynccontextmanager
async def received_processor(
    request: Request, engine: AsyncEngine, parse: Callable[[bytes], T]
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive a processor string, and parse it: as `received`, within `--max-processor-size`."""
    limit = engine.config.max_processor_size
    flag = f"{MAX_PROCESSOR_SIZE_FLAG}; {LARGE_PROCESSOR_ADVICE}"
    async with _received(request, engine, limit, lambda raw, work, _: work.run_if_large(parse, raw), flag) as body:
        yield body


@asynccontextmanager
async def received_artifact(request: Request, engine: AsyncEngine) -> AsyncIterator[ReceivedBody[bytes]]:
    """Receive the bytes of an artifact: as `received`, within `--max-artifact-size`."""
    limit = engine.config.max_artifact_size
    async with _received(request, engine, limit, _unparsed, flag="--max-artifact-size") as body:
        yield body


@asynccontextmanager
async def _received(
    request: Request,
    engine: AsyncEngine,
    limit: int,
    parse: Callable[[bytes, RequestWork, QueuedBody], Awaitable[T]],
    flag: str = "",
) -> AsyncIterator[ReceivedBody[T]]:
    tenant = caller_of(request).tenant
    queued = engine.queued_bytes.open(tenant)
    try:
        raw = await _read(request, _BodyLimit(limit, flag), engine.config.request_body_timeout, queued)
        async with while_connected(request.receive):
            work = RequestWork(engine.pool, tenant, len(raw))
            value = await parse(raw, work, queued)
            del raw  # the request may run for minutes
            yield ReceivedBody(value, work, queued)
    finally:
        queued.release()


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, wherever it waits.

    Args:
        receive: the ASGI function, after the whole body was received.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():  # else cancelled from outside as well
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


@dataclass(frozen=True)
class _BodyLimit:
    """The limit of a body's bytes.

    Attributes:
        limit: most bytes.
        flag: the flag that sets it, and advice; "": nothing is said.
    """

    limit: int
    flag: str

    def check(self, size: int) -> None:
        """Refuse a larger body.

        Raises:
            RequestTooLarge: it is larger.
        """
        if size > self.limit:
            flag = f" ({self.flag})" if self.flag else ""
            raise RequestTooLarge(f"the request body has more than {self.limit} bytes{flag}")


async def _read(request: Request, limit: _BodyLimit, timeout: float, queued: QueuedBody) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        limit.check(int(declared))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.stream():  # a chunked body has no Content-Length
                queued.add(len(piece))
                body += piece
                limit.check(len(body))
    except TimeoutError:
        raise RequestTimeout(
            f"the request body did not arrive within {timeout:g} seconds (--request-body-timeout): send it faster"
        ) from None
    return bytes(body)


async def _unparsed(raw: bytes, work: RequestWork, queued: QueuedBody) -> bytes:
    return raw


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
