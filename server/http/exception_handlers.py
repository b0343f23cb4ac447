"""Errors on their way to the client: one table, one shape.

```
{"error": {"message": "…", "type": "…", "param": "…" or null, "code": "…" or null}}
```

This is OpenAI's shape. SGLang's `/generate` answers `{"error": {"message": "…"}}`, which is a part of it, so both kinds
of client find what they look for. A processor's fault adds `traceback`, `digest` and `name`.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitship.server.refusals import RequestRefused
from logitship.server.requests.messages import RequestError
from logitship.server.schemas.response_schemas import ErrorResponse, FaultDetails

from .body import JSONResponse
from .request_log import note_refusal
from .running_requests import GenerationFailed

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before the answer. Nobody receives it; access logs show it."""

logger = logging.getLogger(__name__)

_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """The body of an error answer."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def refusal_body(refused: RequestRefused) -> ErrorResponse:
    """The body for a request that was not admitted."""
    code = "model_not_found" if refused.param == "model" else _CODES.get(refused.status_code)
    return error_body(refused.message, refused.type, refused.param, code)


def failure_body(failed: GenerationFailed) -> ErrorResponse:
    """The body for a request that was admitted and then ended by an error."""
    error = failed.error
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": "custom_logit_processor" if error.digest else None,
            "code": None,
            "index": failed.index,
            **fault_details(error),
        }
    }


def fault_details(error: RequestError) -> FaultDetails:
    """The processor at fault, in which way it is, and its traceback; empty where no processor is."""
    if error.digest is None:
        return {}
    details: FaultDetails = {"traceback": error.traceback, "digest": error.digest}
    if error.name is not None:
        details["name"] = error.name
    if error.kind is not None:
        details["kind"] = error.kind
    return details


def internal_error_body() -> ErrorResponse:
    """The body for a mistake of ours: the details go to the log, not to the client."""
    return error_body("internal server error", "internal_server_error")


def refusal_response(refused: RequestRefused) -> Response:
    """The answer to a request that was not admitted."""
    note_refusal(refused.type)
    return JSONResponse(refusal_body(refused), refused.status_code, _HEADERS.get(refused.status_code))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return refusal_response(error)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, GenerationFailed)
    return JSONResponse(failure_body(error), error.error.status_code)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    type_ = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return JSONResponse(error_body(message, type_), error.status_code, error.headers)


async def _disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class UnexpectedErrorMiddleware:
    """Logs what is in no table, and answers 500.

    Starlette's own handler raises the exception again after its answer, and the server then logs it in its own way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if started:
                raise  # the server cuts the connection, and logs why
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await JSONResponse(internal_error_body(), 500)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Give `app` the table, and an answer to what is not in it."""
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(GenerationFailed, _failed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_middleware(UnexpectedErrorMiddleware)
