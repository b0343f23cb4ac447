"""Parsing of the servers' error formats into one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from logitship.client.errors import GenerationError, LogitshipError, error_for_status

_ENDED_WHILE_RUNNING = frozenset({"ProcessorFault", "NoTokenLeftError", "NonFiniteLogitsError"})
"""Error types of requests that were accepted and then ended, whatever the status of the response."""
_TRACEBACK = "\nTraceback (most recent call last):\n"


@dataclass(frozen=True)
class ReportedError:
    """An error as a server reports it.

    Attributes:
        message: the server's message.
        type: the server's error type.
        param: the offending field.
        traceback: traceback of the processor's own code.
    """

    message: str
    type: str | None = None
    param: str | None = None
    traceback: str = ""

    def with_parts(self) -> ReportedError:
        """Take type and traceback out of the message, where logitship's plugin for SGLang puts them.

        SGLang passes on nothing but a message.
        """
        kind, colon, message = self.message.partition(": ")
        if self.traceback or not colon or kind not in _ENDED_WHILE_RUNNING:
            return self
        message, mark, traceback = message.partition(_TRACEBACK)
        return replace(self, message=message, type=kind, traceback=mark.lstrip("\n") + traceback)

    def as_generation_error(self, partial: Any = None) -> GenerationError:
        """Return the exception for a request that was accepted and then ended."""
        return GenerationError(self.message, type=self.type, traceback=self.traceback, partial=partial)

    def as_status_error(self, status_code: int, body: Any) -> LogitshipError:
        """Return the exception for a response with an error status."""
        if self.type in _ENDED_WHILE_RUNNING:
            return self.as_generation_error()
        error = error_for_status(status_code)
        return error(self.message, status_code=status_code, param=self.param, type=self.type, body=body)


def parse_error_body(body: Any) -> ReportedError | None:
    """Return the error in a response body or an event of a stream; None if there is none.

    Reads OpenAI's `{"error": {"message", "type", "param", "code"}}`, SGLang's `{"error": {"message"}}`, the flat
    `{"object": "error", "message"}` of older servers, and FastAPI's `{"detail"}`.
    """
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return _from_fields(error)
    if isinstance(error, str):
        return ReportedError(error)
    if body.get("object") == "error":
        return _from_fields(body)
    if "detail" in body:
        return _from_detail(body["detail"])
    return None


def _from_fields(fields: Mapping[str, Any]) -> ReportedError:
    return ReportedError(
        str(fields.get("message") or "the server gave no reason"),
        type=_text(fields.get("type")),
        param=_text(fields.get("param")),
        traceback=_text(fields.get("traceback")) or "",
    ).with_parts()


def _text(value: Any) -> str | None:
    """Return a field as text, since proxies answer in formats of their own."""
    return None if value is None else str(value)


def _from_detail(detail: Any) -> ReportedError:
    """Read FastAPI's `detail`: a message, or pydantic's list of errors with their locations."""
    if not isinstance(detail, list):
        return ReportedError(str(detail))
    errors = [_located(entry) for entry in detail]
    param = errors[0][0].removeprefix("body.") if errors else ""
    messages = [f"{location}: {message}" if location else message for location, message in errors]
    return ReportedError("; ".join(messages), param=param or None)


def _located(entry: Any) -> tuple[str, str]:
    """Return the location and the message of an error in `detail`."""
    if not isinstance(entry, dict):
        return "", str(entry)
    location = entry.get("loc")
    parts = location if isinstance(location, list) else [] if location is None else [location]
    return ".".join(map(str, parts)), str(entry.get("msg", ""))
