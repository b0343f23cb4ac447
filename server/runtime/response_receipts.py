"""Receipts in the responses of an engine's HTTP server, on the routes of OpenAI's and Anthropic's APIs.

The engine's routes know nothing of receipts. Its front end adds those of each continuation to the `ResponseReceipts` of
the HTTP request, and hooks around Starlette's responses write them into the JSON: of whole answers, and of the event of
a stream that has the end of a choice. Sampling records go the same way, in a stream with the next event of the choice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import orjson

from logitship.client.sampling_record import SamplingRecord
from logitship.server.schemas.response_schemas import ReceiptObject

from .hook_target import HookTarget

RECEIPTS = "receipts"
"""Their key, as in logitship's own responses."""
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
"""Events of `/v1/responses` that contain the whole response."""


class ResponseReceipts:
    """The receipts and sampling records of one HTTP response that have not been sent yet."""

    def __init__(self) -> None:
        self._receipts: dict[int, Sequence[ReceiptObject]] = {}
        self._records: dict[int, list[SamplingRecord]] = {}
        self._num_choices = 0

    def __bool__(self) -> bool:
        return bool(self._receipts or self._records)

    def reserve(self, num_choices: int) -> int:
        """Return the index of the first choice of a prompt. Called once for each prompt, in order."""
        first = self._num_choices
        self._num_choices += num_choices
        return first

    def add(self, choice: int, receipts: Sequence[ReceiptObject]) -> None:
        """Add the receipts of a choice that has finished."""
        self._receipts[choice] = receipts

    def add_record(self, choice: int, record: SamplingRecord) -> None:
        """Add the record of the next tokens of a choice."""
        self._records.setdefault(choice, []).append(record)

    def write(self, data: Any) -> bool:
        """Write receipts into a response, or the event of a stream, if it has the end of a choice; records into any.

        Args:
            data: the parsed JSON, which is changed in place.

        Returns:
            True if it was changed.
        """
        if not isinstance(data, dict):
            return False
        if data.get("object") == "response" or data.get("type") in ("message", "message_delta"):
            data[RECEIPTS] = [each for choice in self._receipts.values() for each in choice]
            self._receipts.clear()
            return True
        if data.get("type") in _LAST_EVENTS:
            return self.write(data["response"])
        choices = data.get("choices") or ()
        recorded = [choice for choice in choices if choice["index"] in self._records]
        for choice in recorded:
            choice["sampling_record"] = SamplingRecord.join(self._records.pop(choice["index"])).to_json()
        ended = [choice for choice in choices if choice.get("finish_reason") is not None]
        written = [choice for choice in ended if choice["index"] in self._receipts]
        for choice in written:
            choice[RECEIPTS] = self._receipts.pop(choice["index"])
        return bool(recorded or written)

    def write_event(self, part: str | bytes | memoryview) -> str | bytes | memoryview:
        """Return a part of a stream with receipts, where it has the end of a choice."""
        lines = (part if isinstance(part, str) else bytes(part).decode()).split("\n")
        changed = False
        for number, line in enumerate(lines):
            field, _, value = line.partition(": ")
            if field == "data" and value.startswith("{"):
                data = orjson.loads(value)
                if self.write(data):
                    lines[number] = f"data: {orjson.dumps(data).decode()}"
                    changed = True
        return "\n".join(lines) if changed else part


_current: ContextVar[ResponseReceipts | None] = ContextVar("logitship_response_receipts", default=None)


def expect_receipts() -> None:
    """Let the response to the HTTP request that this task serves have receipts."""
    _current.set(ResponseReceipts())


def response_receipts() -> ResponseReceipts | None:
    """Return the receipts of the HTTP request that this task serves; None if its response is to have none."""
    return _current.get()


async def send_response(call: Callable[..., Any], response: Any, scope: Any, receive: Any, send: Any) -> None:
    """Send a response with its receipts. A hook around Starlette's method."""
    receipts = _current.get()
    if receipts and "json" in response.headers.get("content-type", ""):
        data = orjson.loads(response.body)
        if receipts.write(data):
            response.body = orjson.dumps(data)
            response.headers["content-length"] = str(len(response.body))
    await call(response, scope, receive, send)


async def send_stream(call: Callable[..., Any], response: Any, scope: Any, receive: Any, send: Any) -> None:
    """Send a stream with its receipts. A hook around Starlette's method."""
    receipts = _current.get()
    if receipts is not None:
        response.body_iterator = _with_receipts(response.body_iterator, receipts)
    await call(response, scope, receive, send)


async def _with_receipts(parts: AsyncIterator[Any], receipts: ResponseReceipts) -> AsyncIterator[Any]:
    async for part in parts:
        yield receipts.write_event(part) if receipts else part


HTTP_RESPONSES = (
    HookTarget("starlette.responses.Response.__call__", ["scope", "receive", "send"], send_response),
    HookTarget("starlette.responses.StreamingResponse.__call__", ["scope", "receive", "send"], send_stream),
)
"""Wrapped only where an engine serves HTTP."""
