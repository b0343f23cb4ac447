"""Base class of the response builders of both OpenAI routes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Generic, TypeAlias, TypedDict

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.event_stream import event
from logitship.server.http.response_objects import receipt_objects
from logitship.server.http.running_requests import RunningRequests, raise_if_failed
from logitship.server.requests.continuation import Continuation, best_continuations
from logitship.server.requests.messages import GenerationChunk
from logitship.server.schemas.openai_response_schemas import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChoiceEnding,
    CompletionResponse,
    CompletionStreamResponse,
    UsageInfo,
)

from .openai_requests import Body, ParsedOpenAIRequest

OpenAIResponse: TypeAlias = CompletionResponse | ChatCompletionResponse
OpenAIStreamResponse: TypeAlias = CompletionStreamResponse | ChatCompletionStreamResponse


class NullUsage(TypedDict, total=False):
    """The usage key of every event but the last."""

    usage: None


class OpenAIResponseBuilder(ABC, Generic[Body]):
    """Builds the response to one request, whole or as a stream."""

    def __init__(self, engine: AsyncEngine, request: ParsedOpenAIRequest[Body]) -> None:
        self.request = request
        self.body = request.body
        self.tokenizer = engine.tokenizer
        self._end_tokens = engine.model.eos_token_ids - frozenset(request.body.stop_token_ids)

    @abstractmethod
    def response(self, continuations: list[Continuation]) -> OpenAIResponse:
        """Build the response of a request without `stream`."""

    @abstractmethod
    def empty_stream_response(self) -> OpenAIStreamResponse:
        """Build an event without choices."""

    @abstractmethod
    def stream_responses(self, continuation: Continuation, chunk: GenerationChunk) -> Sequence[OpenAIStreamResponse]:
        """Build the stream's events for one chunk of the engine, with one choice each."""

    async def stream(self, running: RunningRequests) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream.

        Raises:
            GenerationFailed: an error ended one of the continuations.
        """
        async for continuation, chunk in running:
            raise_if_failed(continuation)
            for data in self.stream_responses(continuation, chunk):
                if self.body.usage_in_each_event:
                    data["usage"] = self.usage([continuation])
                yield event(data)
        if self.body.usage_at_end:
            last = self.empty_stream_response()
            last["usage"] = self.usage(running.continuations)
            yield event(last)

    def ending(self, continuation: Continuation) -> ChoiceEnding:
        """Build the fields about the end of a choice; null while it runs."""
        reason = continuation.finish_reason
        if reason is None:
            return {"finish_reason": None, "stop_reason": None}
        assert reason.kind != "absent"
        # vLLM's `stop_reason` names what the request asked to stop at; for the model's own end token it is null.
        matched = None if reason.matched in self._end_tokens else reason.matched
        ending: ChoiceEnding = {"finish_reason": reason.kind, "stop_reason": matched}
        if continuation.receipts:
            ending["receipts"] = receipt_objects(continuation.receipts)
        return ending

    def chosen(self, continuations: Sequence[Continuation]) -> Sequence[Continuation]:
        """Select the continuations that become choices, with their index in the response."""
        made, n = self.body.num_continuations, self.body.n
        if made == n:
            return continuations
        by_prompt = (continuations[first : first + made] for first in range(0, len(continuations), made))
        best = [continuation for of_prompt in by_prompt for continuation in best_continuations(of_prompt, n)]
        return [replace(continuation, index=index) for index, continuation in enumerate(best)]

    def null_usage(self) -> NullUsage:
        """Build the usage key of every event but the last: OpenAI sends null if the last event has the usage."""
        return {"usage": None} if self.body.usage_at_end else {}

    def usage(self, continuations: Sequence[Continuation]) -> UsageInfo:
        """Count tokens. A prompt counts once, with the counts of its first continuation.

        Continuations that `best_of` discards count too: they were generated.
        """
        of_prompt = {continuation.prompt: continuation for continuation in reversed(continuations)}.values()
        prompt = sum(continuation.prompt_tokens for continuation in of_prompt)
        completion = sum(continuation.completion_tokens for continuation in continuations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in of_prompt)},
        }
