"""Reading a request body, and writing a JSON answer."""

from __future__ import annotations

from typing import Any, overload

import orjson
from fastapi import Request, Response

from logitship.server.refusals import BadRequest, RequestTooLarge
from logitship.server.schemas.request_schema import Model, parse_model


async def read_body(request: Request, model: type[Model], limit: int) -> Model:
    """The body of a request, checked.

    Args:
        request: the request.
        model: the schema of its body.
        limit: most bytes that the body may have.

    Raises:
        BadRequest: it is not JSON, or does not fit the schema.
        RequestTooLarge: it has more than `limit` bytes.
        ClientDisconnect: the client went away before it had sent all of it.
    """
    return parse_model(model, await read_json(request, limit))


async def read_json(request: Request, limit: int) -> Any:
    """The body of a request, decoded; raises as `read_body`."""
    return _decode(await read_bytes(request, limit))


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body of a request as it came.

    Raises:
        RequestTooLarge: it has more than `limit` bytes.
        ClientDisconnect: the client went away before it had sent all of it.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.stream():  # a chunked body declares no length
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body has more than {limit} bytes")


def _decode(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not JSON: {error}") from None


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not know. OpenAI's value, and vLLM's."""


@overload
def finite(logprob: float) -> float: ...
@overload
def finite(logprob: float | None) -> float | None: ...
def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can hold it; None stays None."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


class JSONResponse(Response):
    """JSON through orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """The encoded body."""
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
