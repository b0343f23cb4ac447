"""Responses of `/v1/responses`."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from .documented import documented, example_of
from .openai_response_schemas import ChatLogprobsContent
from .response_schemas import ReceiptObject, SamplingMaskFields, TokenTraceObject

_TEXT = {"type": "output_text", "text": "The moon is a rock.", "annotations": []}
_MESSAGE = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [_TEXT]}
_DETAILS = {"cached_tokens": 0, "cache_write_tokens": 0}
_USAGE = {
    "input_tokens": 36,
    "input_tokens_details": _DETAILS,
    "output_tokens": 6,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 42,
}


@documented({**_TEXT, "logprobs": [example_of(ChatLogprobsContent)]})
class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    """Type of the part."""
    text: str
    """The text."""
    annotations: list[str]
    """Always empty."""
    logprobs: NotRequired[list[ChatLogprobsContent]]
    """With `include`: one entry per token."""


@documented(_MESSAGE)
class OutputMessage(TypedDict):
    """The message that was generated."""

    type: Literal["message"]
    """Type of the item."""
    id: str
    """Id of the message."""
    status: Literal["in_progress", "completed", "incomplete"]
    """`incomplete`: the generation was ended by `max_output_tokens`, or aborted."""
    role: Literal["assistant"]
    """Author of the message."""
    content: list[OutputText]
    """One part, or none at the beginning of a stream."""


@documented({"reason": "max_output_tokens"})
class IncompleteDetails(TypedDict):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens", "abort"]
    """The reason."""


@documented(_DETAILS)
class InputTokensDetails(TypedDict):
    """Cached tokens of the prompt."""

    cached_tokens: int
    """Tokens whose KV cache was reused."""
    cache_write_tokens: int
    """Always 0: writing to the cache is not billed."""


@documented({"reasoning_tokens": 0})
class OutputTokensDetails(TypedDict):
    """Tokens of reasoning."""

    reasoning_tokens: int
    """Always 0: reasoning is part of the text."""


@documented(_USAGE)
class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputTokensDetails
    """Breakdown of the input tokens."""
    output_tokens: int
    """Generated tokens."""
    output_tokens_details: OutputTokensDetails
    """Breakdown of the output tokens."""
    total_tokens: int
    """Sum of both."""


_RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1793500000,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": 64,
    "model": "SmolLM2-135M-Instruct",
    "output": [_MESSAGE],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": False,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": _USAGE,
    "receipts": [example_of(ReceiptObject)],
    "token_ids": [504, 9151],
    **example_of(SamplingMaskFields),
    "trace": [example_of(TokenTraceObject)],
}


@documented(_RESPONSE)
class ResponseObject(SamplingMaskFields):
    """A response."""

    id: str
    """Id of the response."""
    object: Literal["response"]
    """Object type."""
    created_at: int
    """Time of the request, as a Unix timestamp."""
    status: Literal["in_progress", "completed", "incomplete"]
    """`incomplete`: the generation was ended by `max_output_tokens`, or aborted."""
    error: None
    """Always null: a failed request has an error response, or an error event."""
    incomplete_details: IncompleteDetails | None
    """Reason of an incomplete response."""
    instructions: str | None
    """The request's."""
    max_output_tokens: int | None
    """The request's."""
    model: str
    """Name of the model."""
    output: list[OutputMessage]
    """The message."""
    parallel_tool_calls: Literal[True]
    """Without meaning: there are no tools here."""
    previous_response_id: None
    """Always null: responses are not stored."""
    store: Literal[False]
    """Always false: responses are not stored."""
    temperature: float
    """The request's."""
    tool_choice: Literal["auto"]
    """Without meaning: there are no tools here."""
    tools: list[str]
    """Always empty."""
    top_p: float
    """The request's."""
    truncation: Literal["disabled"]
    """Prompts are never cut."""
    usage: ResponseUsage | None
    """Token counts; null in the first events of a stream."""
    receipts: NotRequired[list[ReceiptObject]]
    """If the request had processors: one per processor."""
    token_ids: NotRequired[list[int]]
    """With `return_token_ids`: the output's tokens."""
    trace: NotRequired[list[TokenTraceObject]]
    """With `trace`: one entry per token."""


@documented(
    {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        "response": _RESPONSE,
        "item_id": "msg_1",
        "output_index": 0,
        "item": _MESSAGE,
        "content_index": 0,
        "part": _TEXT,
        "delta": "The",
        "text": "The moon is a rock.",
        "logprobs": [example_of(ChatLogprobsContent)],
    }
)
class ResponseEvent(TypedDict):
    """An event of a stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
    ]
    """Type of the event, which is the event's name too."""
    sequence_number: int
    """Number of the event in its stream, from 0."""
    response: NotRequired[ResponseObject]
    """The response so far: in the first two events, and in the last one."""
    item_id: NotRequired[str]
    """Id of the message."""
    output_index: NotRequired[Literal[0]]
    """Place of the message in the response."""
    item: NotRequired[OutputMessage]
    """The message so far."""
    content_index: NotRequired[Literal[0]]
    """Place of the part in the message."""
    part: NotRequired[OutputText]
    """The part so far."""
    delta: NotRequired[str]
    """New text."""
    text: NotRequired[str]
    """The whole text."""
    logprobs: NotRequired[list[ChatLogprobsContent]]
    """One entry per token of the text; empty unless asked for."""
