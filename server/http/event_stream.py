"""Responses of running requests, streamed or whole. Both cancel the requests when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from logitship.server.requests.continuation import Continuation

from .body import JSONResponse
from .exception_handlers import failure_body, internal_error_body
from .running_requests import GenerationFailed, RunningRequests

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """Encode a server-sent event with JSON data."""
    return b"data: " + orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"


async def respond_when_finished(
    request: Request, running: RunningRequests, build: Callable[[list[Continuation]], object]
) -> Response:
    """Wait for all continuations, and respond with one JSON body.

    Args:
        request: the HTTP request.
        running: the requests that it submitted; always closed.
        build: builds the body.

    Raises:
        GenerationFailed: an error ended one of the continuations.
        ClientDisconnect: the client disconnected.
    """
    try:
        continuations = await _unless_disconnected(request.receive, running.finish())
    finally:
        await running.aclose()
    return JSONResponse(build(continuations))


class EventStream(Response):
    """Streams server-sent events, with `[DONE]` at the end.

    The status is sent before the outcome is known, so an error becomes an event: `{"error": {…}}`.

    Args:
        running: the requests that the HTTP request submitted; always closed.
        events: the encoded events, generated from `running`.
    """

    media_type = "text/event-stream"

    def __init__(self, running: RunningRequests, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._running = running
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with suppress(ClientDisconnect):
                await _unless_disconnected(receive, self._send_all(send))
        finally:
            await self._running.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._until_error()) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _until_error(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    yield data
            except GenerationFailed as failed:
                yield event(failure_body(failed))
            # A bug must end this stream with an error event, not cut the connection.
            except Exception:  # boundary: event loop
                logger.exception("unexpected error in a stream")
                yield event(internal_error_body())


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it if the client disconnects first.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
