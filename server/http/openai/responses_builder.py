"""Responses of `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Literal, TypedDict, Unpack
from uuid import uuid4

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.json_responses import trace_objects
from logitship.server.http.mask_objects import mask_fields
from logitship.server.http.running_requests import RunningRequests, event, raise_if_failed
from logitship.server.requests.messages import Continuation, GenerationChunk
from logitship.server.schemas.openai_response_schemas import ChatLogprobsContent
from logitship.server.schemas.openai_schemas import ChatCompletionRequest
from logitship.server.schemas.response_schemas import receipt_objects
from logitship.server.schemas.responses_response_schemas import (
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from logitship.server.schemas.responses_schemas import ResponsesRequest

from .openai_logprobs import chat_logprobs
from .openai_requests import ParsedOpenAIRequest

_Status = Literal["in_progress", "completed", "incomplete"]


class _PartFields(TypedDict, total=False):
    """Fields of an event about a part of the message, besides its place."""

    part: OutputText
    delta: str
    text: str
    logprobs: list[ChatLogprobsContent]


class _EventFields(_PartFields, total=False):
    """Fields of an event, besides its type and its number."""

    response: ResponseObject
    item: OutputMessage
    item_id: str
    output_index: Literal[0]
    content_index: Literal[0]


class ResponsesBuilder:
    """Builds OpenAI's response objects, whole or as a stream of events.

    Args:
        engine: the engine.
        request: the request in the form of a chat.
        body: the body as it was sent.
    """

    def __init__(
        self, engine: AsyncEngine, request: ParsedOpenAIRequest[ChatCompletionRequest], body: ResponsesRequest
    ) -> None:
        self.request = request
        self._body = body
        self._tokenizer = engine.tokenizer
        self._vocab_size = engine.model.vocab_size
        self._message_id = f"msg_{uuid4().hex}"
        self._num_events = 0

    def response(self, continuations: Sequence[Continuation]) -> ResponseObject:
        """Build the response of a request without `stream`."""
        (continuation,) = continuations
        reason = continuation.finish_reason
        assert reason is not None
        response = self._response("completed" if reason.kind == "stop" else "incomplete")
        if reason.kind != "stop":
            response["incomplete_details"] = {"reason": "max_output_tokens" if reason.kind == "length" else "abort"}
        response["output"] = [self._message(response["status"], self._part(continuation))]
        response["usage"] = _usage(continuation)
        if continuation.receipts:
            response["receipts"] = receipt_objects(continuation.receipts)
        if self._body.return_token_ids:
            response["token_ids"] = continuation.token_ids
        params = self.request.submissions[0].request.sampling_params
        response.update(mask_fields(params, self._vocab_size, continuation))  # type: ignore[typeddict-item]
        if self._body.trace is not None:
            response["trace"] = trace_objects(self._tokenizer, continuation.traces)
        return response

    async def stream(self, running: RunningRequests) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream.

        Raises:
            GenerationFailed: an error ended the continuation.
        """
        for data in self._first_events():
            yield data
        async for continuation, chunk in running.at_intervals():
            raise_if_failed(continuation)
            if chunk.text or chunk.logprobs:
                yield self._part_event("response.output_text.delta", delta=chunk.text, logprobs=self._logprobs(chunk))
        for data in self._last_events(running.continuations):
            yield data

    def _first_events(self) -> Iterator[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress"))
        yield self._part_event("response.content_part.added", part=self._empty_part())

    def _last_events(self, continuations: Sequence[Continuation]) -> Iterator[bytes]:
        response = self.response(continuations)
        (message,) = response["output"]
        (part,) = message["content"]
        logprobs = self._logprobs(continuations[0])
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=logprobs)
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)
        is_complete = response["status"] == "completed"
        yield self._event("response.completed" if is_complete else "response.incomplete", response=response)

    def _response(self, status: _Status) -> ResponseObject:
        """Build a response without its output."""
        body = self._body
        return {
            "id": self.request.id,
            "object": "response",
            "created_at": self.request.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _message(self, status: _Status, *parts: OutputText) -> OutputMessage:
        return {
            "type": "message",
            "id": self._message_id,
            "status": status,
            "role": "assistant",
            "content": list(parts),
        }

    def _part(self, continuation: Continuation) -> OutputText:
        part = self._empty_part()
        part["text"] = continuation.text
        if self._body.include:
            part["logprobs"] = self._logprobs(continuation)
        return part

    def _empty_part(self) -> OutputText:
        return {"type": "output_text", "text": "", "annotations": []}

    def _logprobs(self, part: Continuation | GenerationChunk) -> list[ChatLogprobsContent]:
        return chat_logprobs(self._tokenizer, part.logprobs)["content"] if self._body.include else []

    def _part_event(self, kind: str, **fields: Unpack[_PartFields]) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Unpack[_EventFields]) -> bytes:
        data: ResponseEvent = {"type": kind, "sequence_number": self._num_events, **fields}  # type: ignore[typeddict-item]
        self._num_events += 1
        return b"event: " + kind.encode() + b"\n" + event(data)


def _usage(continuation: Continuation) -> ResponseUsage:
    prompt, output = continuation.prompt_tokens, continuation.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": continuation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
