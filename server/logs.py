"""How the server logs: lines for people, or JSON objects for machines.

A record may bring fields of its own: `logger.info("…", extra={"fields": {"status": 200}})`. Text shows the message
alone, so that it must say what people need; JSON has both. Neither prompts nor outputs nor keys belong into either.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

LogFormat = Literal["text", "json"]

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""Id of the HTTP request that the running code belongs to, if it does to one."""

_LONGEST_TEXT = 256
"""Characters of a field: some hold what clients wrote."""
_MOST_ITEMS = 32
"""Entries of a field that is a list."""


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Log to the standard error output, other libraries' messages included.

    Args:
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """A line for people, with the request's id at the end where a message belongs to one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's
        """The line, without a traceback."""
        line = super().formatMessage(record)
        request_id = current_request_id.get()
        return line if request_id is None else f"{line} [{request_id}]"


class JSONFormatter(logging.Formatter):
    """One JSON object a line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, `request_id` and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= _bounded(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Whatever stands in a message: half a surrogate pair, or an object that is no JSON, must not lose the line.
        return orjson.dumps(_encodable(line), default=repr).decode()


def _bounded(value: Any) -> Any:
    """The same with long texts and lists cut."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, Mapping):
        return {key: _bounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(each) for each in value[:_MOST_ITEMS]]
    return value


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value
