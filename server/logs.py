"""Log formatters of the server: text lines, or one JSON object per line.

A record may have structured fields: `logger.info("…", extra={"fields": {"status": 200}})`. The text format shows only
the message, the JSON format both. Never log prompts, outputs or keys.
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
"""Id of the HTTP request that is being handled; None outside of one."""

_MAX_TEXT_LENGTH = 256
"""Maximum length of a field, in characters: clients control some of them."""
_MAX_ITEMS = 32
"""Maximum number of entries of a list field."""


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Log to stderr, including the messages of other libraries.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        log_format: `text` or `json`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """One text line, with the id of the HTTP request at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's
        """Format the line, without a traceback."""
        line = super().formatMessage(record)
        request_id = current_request_id.get()
        return line if request_id is None else f"{line} [{request_id}]"


class JSONFormatter(logging.Formatter):
    """One JSON object per line: `time` (ISO 8601, UTC), `level`, `logger`, `message`, `request_id` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= _truncated(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # A lone surrogate or an object that JSON cannot encode must not lose the line.
        return orjson.dumps(_encodable(line), default=repr).decode()


def _truncated(value: Any) -> Any:
    """Truncate long strings and lists."""
    if isinstance(value, str):
        return value[:_MAX_TEXT_LENGTH]
    if isinstance(value, Mapping):
        return {key: _truncated(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_truncated(each) for each in value[:_MAX_ITEMS]]
    return value


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return value
