"""JSON responses: objects that several routes return, and errors with their status.

The body of an error:

```
{"error": {"message": "…", "type": "…", "param": "…" or null, "code": "…" or null}}
```

This is OpenAI's format, and a superset of SGLang's `{"error": {"message": "…"}}`, so clients of both can parse it. A
processor's fault adds `traceback`, `digest`, `name` and `kind`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, TypedDict, cast, overload

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitship.client.records import TraceStage
from logitship.sampler.trace import RowTrace
from logitship.server.refusals import RequestRefused
from logitship.server.requests.messages import RequestError
from logitship.server.schemas.response_schemas import (
    ErrorResponse,
    FaultDetails,
    StageName,
    TokenTraceObject,
    TraceStageObject,
    TraceToken,
)
from logitship.server.tokenizer import Tokenizer
from logitship.server.uploads.refusal_responses import CLIENT_CLOSED_REQUEST, JSONResponse, error_body, response_to

from .request_log import note_refusal

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent. OpenAI's and vLLM's value."""


@overload
def finite(logprob: float) -> float: ...


@overload
def finite(logprob: float | None) -> float | None: ...


def finite(logprob: float | None) -> float | None:
    """Replace minus infinity by `LOWEST_LOGPROB`; None stays None."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def trace_objects(tokenizer: Tokenizer, traces: Sequence[RowTrace]) -> list[TokenTraceObject]:
    """Build one object per token. The log-probability of a token that a stage forbids is null.

    Args:
        tokenizer: gives the tokens' texts.
        traces: one per token.
    """
    return [
        {
            **_token(tokenizer, trace.token_id),
            "candidates": [_token(tokenizer, token_id) for token_id in trace.candidates],
            "stages": [_stage(stage) for stage in trace.stages],
        }
        for trace in traces
    ]


class _StageProcessor(TypedDict, total=False):
    """Keys of a stage that is a processor."""

    name: str
    digest: str
    again: Literal[True]


def _token(tokenizer: Tokenizer, token_id: int) -> TraceToken:
    return {"token_id": token_id, "text": tokenizer.token_text(token_id)}


def _stage(stage: TraceStage) -> TraceStageObject:
    processor: _StageProcessor = {}
    if stage.digest is not None and stage.name is not None:
        processor = {"name": stage.name, "digest": stage.digest}
    if stage.again:
        processor["again"] = True
    return {
        "stage": cast("StageName", stage.stage),
        **processor,
        "logprobs": [finite(logprob) for logprob in stage.logprobs],
        "num_allowed": stage.num_allowed,
    }


logger = logging.getLogger(__name__)


class GenerationFailed(Exception):
    """An admitted request was ended by an error.

    Attributes:
        error: what went wrong.
        index: index in the response of the first continuation that failed.
    """

    def __init__(self, error: RequestError, index: int) -> None:
        super().__init__(error.message)
        self.error = error
        self.index = index


def failure_body(failed: GenerationFailed) -> ErrorResponse:
    """Build the body for a request that an error ended after its admission."""
    error = failed.error
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": None,  # `digest` identifies a processor: several fields can hold one
            "code": None,
            "index": failed.index,
            **fault_details(error),
        }
    }


def fault_details(error: RequestError) -> FaultDetails:
    """Build the keys for a processor's fault; empty for other errors."""
    if error.digest is None:
        return {}
    details: FaultDetails = {"traceback": error.traceback, "digest": error.digest}
    if error.name is not None:
        details["name"] = error.name
    if error.kind is not None:
        details["kind"] = error.kind
    return details


def internal_error_body() -> ErrorResponse:
    """Build the body for a bug in the server: the details go to the log, not to the client."""
    return error_body("internal server error", "internal_server_error")


def refusal_response(refused: RequestRefused) -> Response:
    """Build the response to a refused request, and note the refusal for the request log."""
    note_refusal(refused)
    return response_to(refused)


async def _handle_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return refusal_response(error)


async def _handle_failure(_: Request, error: Exception) -> Response:
    assert isinstance(error, GenerationFailed)
    return JSONResponse(failure_body(error), error.error.status_code)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    type_ = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return JSONResponse(error_body(message, type_), error.status_code, error.headers)


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class UnexpectedErrorMiddleware:
    """Logs unhandled exceptions and responds with 500.

    Starlette's own handler re-raises after its response, and uvicorn would then log the exception a second time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request."""
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
        # A bug in one request must not end the server.
        except Exception:  # boundary: event loop
            if started:
                raise  # uvicorn logs it and closes the connection
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await JSONResponse(internal_error_body(), 500)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Register the handlers, and the middleware for unhandled exceptions."""
    app.add_exception_handler(RequestRefused, _handle_refusal)
    app.add_exception_handler(GenerationFailed, _handle_failure)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)
    app.add_middleware(UnexpectedErrorMiddleware)
