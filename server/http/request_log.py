"""The request log: one line per HTTP request, at its end, and a request id in all log lines."""

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
from logitship.server.metrics.engine_stats import OTHER
from logitship.server.metrics.observed_metrics import EngineMetrics
from logitship.server.refusals import RateLimited, RequestRefused
from logitship.server.requests.messages import Continuation
from logitship.server.schemas.request_schema import IgnoredFields

logger = logging.getLogger(__name__)

HEADER = "X-Request-ID"
IGNORED_HEADER = "X-Logitship-Ignored"
"""Names of the request's fields that were accepted without effect."""
PROCESSORS_HEADER = "X-Logitship-Processors"
"""Digests of the processors that the request's output went through. Clients often drop the receipts in the body."""
_MAX_DIGESTS = 32
"""Most digests in the header, for a batch whose prompts have their own: clients limit the size of headers."""
QUIET_PATHS = frozenset({"/health", "/health/ready", "/health_generate", "/metrics", "/ping"})
"""Paths that are polled every few seconds: a response with status 200 is logged at level `debug`."""

_SANE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""Client-supplied ids that are safe in a header and in a log."""
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_MAX_PATH_LENGTH = 200
"""Characters."""


class GenerationProgress(Protocol):
    """The part of `RunningRequests` that the log reads.

    Attributes:
        continuations: those of all prompts, as far as they have been generated.
        first_token_at: when the first token arrived, on the clock of `time.perf_counter`; None before that.
        digests: those of all processors that are applied.
    """

    continuations: Sequence[Continuation]
    first_token_at: float | None
    digests: Sequence[str]


class RequestRecord:
    """Data for the log line of an HTTP request.

    Attributes:
        id: the client's, from the header; else the id of the response, once it is known.
        refusal: type of the error that refused the request.
        rate_limit: the limit per minute that was reached.
        ignored: names of the request's fields that were accepted without effect; may grow until the response starts.
    """

    def __init__(self, header: str | None) -> None:
        self._has_own_id = header is not None and _SANE_ID.fullmatch(header) is not None
        self.id = header if header is not None and self._has_own_id else uuid4().hex
        self.refusal: str | None = None
        self.rate_limit: str | None = None
        self.ignored: IgnoredFields = set()
        self._began = time.perf_counter()
        self._progress: GenerationProgress | None = None

    @property
    def seconds(self) -> float:
        """Time since the request arrived."""
        return time.perf_counter() - self._began

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        digests = () if self._progress is None else self._progress.digests[:_MAX_DIGESTS]
        lists = {IGNORED_HEADER: sorted(self.ignored), PROCESSORS_HEADER: digests}
        return {HEADER: self.id, **{name: ", ".join(values) for name, values in lists.items() if values}}

    def follow(self, progress: GenerationProgress, request_id: str | None) -> None:
        """Include the outcome of the engine's requests in the log line.

        Args:
            progress: the requests.
            request_id: id of the response; None if it has several.
        """
        self._progress = progress
        if not self._has_own_id and request_id is not None and _SANE_ID.fullmatch(request_id):
            self.id = request_id
            current_request_id.set(request_id)

    def generated(self) -> dict[str, Any]:
        """Return the fields about the generation; empty for requests that do not generate."""
        progress = self._progress
        if progress is None:
            return {}
        continuations = progress.continuations
        reasons = [each.finish_reason for each in continuations if each.finish_reason and not each.is_absent]
        # By prompt: the count of the first continuation. The others may not have begun.
        of_prompt = {each.prompt: each.prompt_tokens for each in reversed(continuations)}
        fields: dict[str, Any] = {
            "prompt_tokens": sum(of_prompt.values()),
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
    """Call `RequestRecord.follow` on the current HTTP request."""
    if (record := _current.get()) is not None:
        record.follow(progress, request_id)


def note_ignored(ignored: IgnoredFields) -> None:
    """Set the ignored fields of the current HTTP request, which may grow until its response starts."""
    if (record := _current.get()) is not None:
        record.ignored = ignored


def note_refusal(refused: RequestRefused) -> None:
    """Record that the current HTTP request was refused. The message is not logged: it quotes the client's input."""
    if (record := _current.get()) is not None:
        record.refusal = refused.type
        record.rate_limit = refused.what if isinstance(refused, RateLimited) else None


class RequestLogMiddleware:
    """Sets `X-Request-ID` and logitship's headers on responses, and logs and counts each HTTP request at its end."""

    def __init__(self, app: ASGIApp, metrics: EngineMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(Headers(scope=scope).get(HEADER))
        _current.set(record)
        current_request_id.set(record.id)
        status = 500  # if no response was started

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(record.headers)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._write(scope, record, status)

    def _write(self, scope: Scope, record: RequestRecord, status: int) -> None:
        seconds = record.seconds
        method = scope["method"] if scope["method"] in _METHODS else OTHER
        self._metrics.http_answered(method, _route(scope), status, seconds)
        if record.rate_limit is not None:
            self._metrics.rate_limited(record.rate_limit)
        caller = scope.get("state", {}).get("caller")
        fields = {
            "method": method,
            "path": quote(scope["path"])[:_MAX_PATH_LENGTH],
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
    """Sum up the processors' times over all continuations of a request."""
    found: dict[str, dict[str, Any]] = {}
    for receipt in receipts:
        entry = found.setdefault(receipt.digest, {"name": receipt.name, "digest": receipt.digest, "milliseconds": 0.0})
        entry["milliseconds"] = round(entry["milliseconds"] + receipt.milliseconds, 3)
    return list(found.values())


def _sentence(fields: Mapping[str, Any]) -> str:
    """Format the text line."""
    words = [f"{fields['method']} {fields['path']} {fields['status']} {fields['duration_seconds']:.3f}s"]
    if "completion_tokens" in fields:
        words.append(f"{fields['prompt_tokens']}+{fields['completion_tokens']} tokens")
        words.append(_join_reasons(fields["finish_reasons"]))
        words += [f"{_escaped(each['name'])} {each['milliseconds']:g}ms" for each in fields.get("processors", ())]
    if "error" in fields:
        words.append(", ".join(f"{name}={_escaped(value)}" for name, value in fields["error"].items() if value))
    return "  ".join(word for word in words if word)


def _join_reasons(reasons: Sequence[str]) -> str:
    return ",".join(sorted(set(reasons)))


def _escaped(value: Any) -> str:
    """Escape and truncate a name that a client may have chosen."""
    return str(value).encode("unicode_escape").decode()[:80]
