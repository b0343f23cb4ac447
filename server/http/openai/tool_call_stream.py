"""Messages with tool calls, whole or as a stream."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import uuid4

from logitship.server.schemas.openai_response_schemas import (
    CalledFunctionObject,
    ChatMessage,
    DeltaMessage,
    ToolCallDelta,
    ToolCallObject,
)

from .tool_calls import OutputPart, ToolCallPart
from .tool_use import ToolUse


class ToolCallStream:
    """The message of one continuation.

    Attributes:
        use: how the request's tools are used.
    """

    def __init__(self, use: ToolUse) -> None:
        self.use = use
        self._parser = use.parser()

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._parser.num_calls

    def delta(self, text: str, *, is_last: bool) -> DeltaMessage:
        """Return the new part of the message; without keys if it is not known yet what the new text is."""
        delta: DeltaMessage = {}
        for part in self._parts(text, is_last=is_last):
            if isinstance(part, str):
                delta["content"] = (delta.get("content") or "") + part
            else:
                _add_delta(delta.setdefault("tool_calls", []), part)
        return delta

    def message(self, text: str) -> ChatMessage:
        """Return the whole message."""
        content: list[str] = []
        calls: list[ToolCallObject] = []
        for part in self._parts(text, is_last=True):
            if isinstance(part, str):
                content.append(part)
            elif part.name is not None:
                function: CalledFunctionObject = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": _call_id(), "type": "function", "function": function})
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        if not calls:
            return {"role": "assistant", "content": "".join(content), "refusal": None}
        return {"role": "assistant", "content": "".join(content) or None, "refusal": None, "tool_calls": calls}

    def _parts(self, text: str, *, is_last: bool) -> Iterable[OutputPart]:
        parts = self._parser.push(text)
        return [*parts, *self._parser.flush()] if is_last else parts


def _add_delta(deltas: list[ToolCallDelta], part: ToolCallPart) -> None:
    """Add a part of a call. An event has one part of each call."""
    if deltas and deltas[-1]["index"] == part.index:
        deltas[-1]["function"]["arguments"] += part.arguments
    elif part.name is None:
        deltas.append({"index": part.index, "function": {"arguments": part.arguments}})
    else:
        function: CalledFunctionObject = {"name": part.name, "arguments": part.arguments}
        deltas.append({"index": part.index, "id": _call_id(), "type": "function", "function": function})


def _call_id() -> str:
    return f"call_{uuid4().hex}"
