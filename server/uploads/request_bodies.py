"""Receiving bodies within bounds of time and bytes, and the CPU work that they ask for.

A client that disconnects cancels the work, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from logitship.client.errors import LARGE_PROCESSOR_ADVICE, MAX_PROCESSOR_SIZE_FLAG
from logitship.server.refusals import RequestTimeout, RequestTooLarge
from logitship.server.requests.body_limits import QueuedBody
from logitship.server.requests.fair_pool import FairPool
from logitship.server.schemas.request_schema import IgnoredFields

from .upload_engine import UploadEngine, caller_of

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
async def received_processor(
    request: Request, engine: UploadEngine, parse: Callable[[bytes], T]
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive a processor string, and parse it: as `received_body`, within `--max-processor-size`."""
    limit = engine.config.max_processor_size
    flag = f"{MAX_PROCESSOR_SIZE_FLAG}; {LARGE_PROCESSOR_ADVICE}"
    async with received_body(request, engine, limit, lambda raw, work, _: work.run_if_large(parse, raw), flag) as body:
        yield body


@asynccontextmanager
async def received_artifact(request: Request, engine: UploadEngine) -> AsyncIterator[ReceivedBody[bytes]]:
    """Receive the bytes of an artifact: as `received_body`, within `--max-artifact-size`."""
    limit = engine.config.max_artifact_size
    async with received_body(request, engine, limit, _unparsed, flag="--max-artifact-size") as body:
        yield body


@asynccontextmanager
async def received_body(
    request: Request,
    engine: UploadEngine,
    limit: int,
    parse: Callable[[bytes, RequestWork, QueuedBody], Awaitable[T]],
    flag: str = "",
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive the bytes of a body, and parse them.

    In the block, its bytes are counted, and a client that disconnects cancels what is awaited.

    Args:
        request: the request, of a known caller.
        engine: has the limits, and counts the bytes.
        limit: most bytes.
        parse: parses them.
        flag: the flag that sets the limit, and advice, for the error.

    Raises:
        RequestTooLarge: it has too many bytes.
        RequestTimeout: it took too long to arrive.
        QueueFull: too many bytes wait already.
        ClientDisconnect: the client disconnected.
    """
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
