"""One log line for each HTTP request, at its end, and an id that ties together what is logged of it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logitship.client.records import Receipt
from logitship.server.logs import current_request_id
from logitship.server.metrics.engine_metrics import EngineMetrics
from logitship.server.requests.continuation import Continuation

logger = logging.getLogger(__name__)

HEADER = "X-Request-ID"
QUIET_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
"""What machines ask for every few seconds: an answer of 200 is logged at the level `debug`."""

_SANE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""Ids of clients that may stand in a header and in a log as they are."""
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER = "other"
"""In metrics: stands for other methods, and for paths that no route has. There may be any number of both."""
_LONGEST_PATH = 200
"""Characters."""


class GenerationProgress(Protocol):
    """What `RunningRequests` tells the log.

    Attributes:
        continuations: those of all prompts, as far as they have been generated.
        first_token_at: when the first token arrived, on the clock of `time.perf_counter`; None before that.
    """

    continuations: Sequence[Continuation]
    first_token_at: float | None


class RequestRecord:
    """What is to be logged of an HTTP request.

    Attributes:
        id: the client's own, in the header; else that of the answer, once there is one.
        refusal: type of the error that it was refused with.
    """

    def __init__(self, header: str | None) -> None:
        self._has_own_id = header is not None and _SANE_ID.fullmatch(header) is not None
        self.id = header if header is not None and self._has_own_id else uuid4().hex
        self.refusal: str | None = None
        self._began = time.perf_counter()
        self._progress: GenerationProgress | None = None

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.perf_counter() - self._began

    def follow(self, progress: GenerationProgress, request_id: str | None) -> None:
        """Log what becomes of these requests in the engine.

        Args:
            request_id: that of the answer; None if the answer has several.
        """
        self._progress = progress
        if not self._has_own_id and request_id is not None and _SANE_ID.fullmatch(request_id):
            self.id = request_id
            current_request_id.set(request_id)

    def generated(self) -> dict[str, Any]:
        """What was generated; empty for requests that are not about that."""
        progress = self._progress
        if progress is None:
            return {}
        continuations = progress.continuations
        reasons = [each.finish_reason for each in continuations if each.finish_reason is not None]
        fields: dict[str, Any] = {
            "prompt_tokens": sum({each.prompt: each.prompt_tokens for each in continuations}.values()),
            "completion_tokens": sum(each.completion_tokens for each in continuations),
            "finish_reasons": ["error" if reason.error else reason.kind for reason in reasons],
        }
        if (error := next((reason.error for reason in reasons if reason.error), None)) is not None:
            fields["error"] = {"type": error.type, "kind": error.kind, "processor": error.name, "digest": error.digest}
        if progress.first_token_at is not None:
            fields["ttft_seconds"] = round(progress.first_token_at - self._began, 6)
        if processors := _processors(receipt for each in continuations for receipt in each.receipts):
            fields["processors"] = processors
        return fields


_current: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


def follow(progress: GenerationProgress, request_id: str | None) -> None:
    """Log of the current HTTP request what becomes of its requests in the engine: see `RequestRecord.follow`."""
    if (record := _current.get()) is not None:
        record.follow(progress, request_id)


def note_refusal(error_type: str) -> None:
    """Log of the current HTTP request that it was refused. Not in which words: these quote what the client wrote."""
    if (record := _current.get()) is not None:
        record.refusal = error_type


class RequestLogMiddleware:
    """Answers with `X-Request-ID`, and at the end of each HTTP request writes its line and its metrics."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(Headers(scope=scope).get(HEADER))
        _current.set(record)
        current_request_id.set(record.id)
        status = 500  # of an answer that was never begun

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = record.id
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._write(scope, record, status)

    def _write(self, scope: Scope, record: RequestRecord, status: int) -> None:
        seconds = record.seconds
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._metrics.http_answered(method, _route(scope), status, seconds)
        caller = scope.get("state", {}).get("caller")
        fields = {
            "method": method,
            "path": quote(scope["path"])[:_LONGEST_PATH],
            "status": status,
            "tenant": caller.tenant if caller is not None and caller.tenant else None,
            "duration_seconds": round(seconds, 6),
            "error": None if record.refusal is None else {"type": record.refusal},
            **record.generated(),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        level = logging.DEBUG if status == 200 and scope["path"] in QUIET_PATHS else logging.INFO
        logger.log(level, "%s", _sentence(fields), extra={"fields": fields})


def _route(scope: Scope) -> str:
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else OTHER


def _processors(receipts: Iterable[Receipt]) -> list[dict[str, Any]]:
    """A request's processors, with the time of all its continuations together."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in receipts:
        entry = found.setdefault(receipt.digest, {"name": receipt.name, "digest": receipt.digest, "milliseconds": 0.0})
        entry["milliseconds"] = round(entry["milliseconds"] + receipt.milliseconds, 3)
    return list(found.values())


def _sentence(fields: Mapping[str, Any]) -> str:
    """The line for people."""
    words = [f"{fields['method']} {fields['path']} {fields['status']} {fields['duration_seconds']:.3f}s"]
    if "completion_tokens" in fields:
        words.append(f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens")
        words.append(_joined(fields["finish_reasons"]))
        words += [f"{_shown(each['name'])} {each['milliseconds']:g}ms" for each in fields.get("processors", ())]
    if "error" in fields:
        words.append(", ".join(f"{name}={_shown(value)}" for name, value in fields["error"].items() if value))
    return "  ".join(word for word in words if word)


def _joined(reasons: Sequence[str]) -> str:
    return ",".join(sorted(set(reasons)))


def _shown(value: Any) -> str:
    """A name that a client may have chosen, in one piece and on one line."""
    return str(value).encode("unicode_escape").decode()[:80]
