"""Receiving request bodies, within bounds of time, bytes and elements."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import orjson
from fastapi import Request

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, RequestTimeout, RequestTooLarge
from logitship.server.requests.json_scan import MAX_DEPTH, scan_json
from logitship.server.requests.queued_bytes import BYTES_PER_ELEMENT, QueuedBody
from logitship.server.schemas.request_schema import Model, parse_model

from .auth import caller_of
from .disconnects import while_connected
from .request_work import RequestWork

T = TypeVar("T")


@dataclass(frozen=True)
class ReceivedBody(Generic[T]):
    """A parsed body.

    Attributes:
        value: what was parsed.
        work: runs what the body asks for before its first step.
        queued: counts its bytes.
    """

    value: T
    work: RequestWork
    queued: QueuedBody


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
    async with received_json(request, engine, partial(parse_model, model)) as body:
        yield body


@asynccontextmanager
async def received_json(
    request: Request, engine: AsyncEngine, parse: Callable[[Any], T]
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive a JSON body, and parse what was decoded: as `received`."""
    decode = partial(_decode, max_elements=engine.config.max_request_elements, parse=parse)
    async with _received(request, engine, engine.config.max_request_bytes, decode) as body:
        yield body


@asynccontextmanager
async def received_processor(
    request: Request, engine: AsyncEngine, parse: Callable[[bytes], T]
) -> AsyncIterator[ReceivedBody[T]]:
    """Receive a processor string, and parse it: as `received`, within `--max-processor-size`."""
    limit = engine.config.max_processor_size
    async with _received(request, engine, limit, lambda raw, queued: parse(raw)) as body:
        yield body


@asynccontextmanager
async def _received(
    request: Request, engine: AsyncEngine, limit: int, parse: Callable[[bytes, QueuedBody], T]
) -> AsyncIterator[ReceivedBody[T]]:
    tenant = caller_of(request).tenant
    queued = engine.queued_bytes.open(tenant)
    try:
        raw = await _read(request, limit, engine.config.request_body_timeout, queued)
        async with while_connected(request.receive):
            work = RequestWork(engine.pool, tenant, len(raw))
            value = await work.run_if_large(parse, raw, queued)
            del raw  # the request may run for minutes
            yield ReceivedBody(value, work, queued)
    finally:
        queued.release()


async def _read(request: Request, limit: int, timeout: float, queued: QueuedBody) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.stream():  # a chunked body has no Content-Length
                queued.add(len(piece))
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise RequestTimeout(
            f"the request body did not arrive within {timeout:g} seconds (--request-body-timeout): send it faster"
        ) from None
    return bytes(body)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body has more than {limit} bytes")


def _decode(raw: bytes, queued: QueuedBody, *, max_elements: int, parse: Callable[[Any], T]) -> T:
    scan = scan_json(raw, max_elements)
    if scan.elements > max_elements:
        raise RequestTooLarge(
            f"the request body has more than {max_elements} keys and values (a key counts as 3, a list or an object as "
            "4), the most that this server takes (--max-request-elements): send them in several requests"
        )
    if scan.max_depth > MAX_DEPTH:
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    queued.add(BYTES_PER_ELEMENT * scan.elements)  # before they exist
    queued.depth = scan.max_depth
    return parse(_loads(raw))


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
