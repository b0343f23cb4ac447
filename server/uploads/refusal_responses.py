"""JSON responses, and those to refused requests."""

from __future__ import annotations

import orjson
from fastapi import Response

from logitship.server.refusals import RequestRefused
from logitship.server.schemas.response_schemas import ErrorResponse

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the response. It only shows in access logs."""

_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


class JSONResponse(Response):
    """JSON response, encoded with orjson."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the body."""
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """Build the body of an error response."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def refusal_body(refused: RequestRefused) -> ErrorResponse:
    """Build the body for a refused request."""
    code = "model_not_found" if refused.param == "model" else _CODES.get(refused.status_code)
    return error_body(refused.message, refused.type, refused.param, code)


def response_to(refused: RequestRefused) -> Response:
    """Build the response to a refused request."""
    headers = dict(_HEADERS.get(refused.status_code, {}))
    if refused.retry_after is not None:
        headers["Retry-After"] = str(refused.retry_after)
    return JSONResponse(refusal_body(refused), refused.status_code, headers)
