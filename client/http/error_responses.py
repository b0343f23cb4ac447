"""The servers' ways of telling what went wrong, read into one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitship.client.errors import GenerationError, LogitshipError, error_for_status

_ENDED_WHILE_RUNNING = frozenset({"ProcessorFault", "NoTokenLeftError", "NonFiniteLogitsError"})
"""Error types with which a server ends a request that it had accepted, whatever status it then has to answer with."""


@dataclass(frozen=True)
class Problem:
    """What a server says of a failure.

    Attributes:
        message: its sentence.
        type: its error type.
        param: the offending field.
        traceback: traceback of a processor's own code.
    """

    message: str
    type: str | None = None
    param: str | None = None
    traceback: str = ""

    def as_generation_error(self, partial: Any = None) -> GenerationError:
        """The exception for a request that was accepted and then ended."""
        return GenerationError(self.message, type=self.type, traceback=self.traceback, partial=partial)

    def as_status_error(self, status_code: int, body: Any) -> LogitshipError:
        """The exception for an answer with an error status."""
        if self.type in _ENDED_WHILE_RUNNING:
            return self.as_generation_error()
        error = error_for_status(status_code)
        return error(self.message, status_code=status_code, param=self.param, type=self.type, body=body)


def problem_in(body: Any) -> Problem | None:
    """The problem that an answer or a stream's event tells of; None where it tells of none.

    Reads OpenAI's `{"error": {"message", "type", "param", "code"}}`, SGLang's `{"error": {"message"}}`, the flat
    `{"object": "error", "message"}` of older servers, and FastAPI's `{"detail"}`.
    """
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return _from_fields(error)
    if isinstance(error, str):
        return Problem(error)
    if body.get("object") == "error":
        return _from_fields(body)
    if "detail" in body:
        return _from_detail(body["detail"])
    return None


def _from_fields(fields: Mapping[str, Any]) -> Problem:
    return Problem(
        str(fields.get("message") or "the server gave no reason"),
        type=fields.get("type"),
        param=fields.get("param"),
        traceback=fields.get("traceback") or "",
    )


def _from_detail(detail: Any) -> Problem:
    """FastAPI's `detail`: a sentence, or pydantic's list of what is wrong where."""
    if not isinstance(detail, list):
        return Problem(str(detail))
    places = [(".".join(str(part) for part in entry.get("loc", ())), entry.get("msg", "")) for entry in detail]
    param = places[0][0].removeprefix("body.") if places else None
    return Problem("; ".join(f"{where}: {what}" for where, what in places), param=param)
