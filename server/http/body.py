"""Reading request bodies and writing JSON responses."""

from __future__ import annotations

from typing import Any, overload

import orjson
from fastapi import Request, Response

from logitship.server.refusals import BadRequest, RequestTooLarge
from logitship.server.schemas.request_schema import Model, parse_model


async def read_body(request: Request, model: type[Model], limit: int) -> Model:
    """Read and validate the body of a request.

    Args:
        request: the request.
        model: the schema of its body.
        limit: maximum size, in bytes.

    Raises:
        BadRequest: the body is not JSON, or does not match the schema.
        RequestTooLarge: the body has more than `limit` bytes.
        ClientDisconnect: the client disconnected while sending.
    """
    return parse_model(model, await read_json(request, limit))


async def read_json(request: Request, limit: int) -> Any:
    """Read and decode the body of a request. Raises what `read_body` raises."""
    return _decode(await read_bytes(request, limit))


async def read_bytes(request: Request, limit: int) -> bytes:
    """Read the raw body of a request.

    Raises:
        RequestTooLarge: the body has more than `limit` bytes.
        ClientDisconnect: the client disconnected while sending.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.stream():  # a chunked body has no Content-Length
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
"""Replaces minus infinity, which JSON cannot represent. OpenAI's and vLLM's value."""


@overload
def finite(logprob: float) -> float: ...
@overload
def finite(logprob: float | None) -> float | None: ...
def finite(logprob: float | None) -> float | None:
    """Replace minus infinity by `LOWEST_LOGPROB`; None stays None."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


class JSONResponse(Response):
    """JSON response, encoded with orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the body."""
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
