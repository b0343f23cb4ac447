"""Responses of `/v1/chat/completions`."""

from __future__ import annotations

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.response_objects import trace_objects
from logitship.server.requests.continuation import Continuation
from logitship.server.requests.messages import GenerationChunk
from logitship.server.schemas.openai_response_schemas import (
    ChatChoice,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChatStreamChoice,
)
from logitship.server.schemas.openai_schemas import ChatCompletionRequest

from .openai_logprobs import chat_logprobs, prompt_logprobs
from .openai_requests import ParsedOpenAIRequest
from .openai_response_builder import OpenAIResponseBuilder


class ChatResponseBuilder(OpenAIResponseBuilder[ChatCompletionRequest]):
    """Builds OpenAI's chat completion objects."""

    def __init__(self, engine: AsyncEngine, request: ParsedOpenAIRequest[ChatCompletionRequest]) -> None:
        super().__init__(engine, request)
        self._begun: set[int] = set()
        self._empty_stream_response: ChatCompletionStreamResponse = {
            "id": request.id,
            "object": "chat.completion.chunk",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": None,
            **self.null_usage(),
            "choices": [],
        }

    def response(self, continuations: list[Continuation]) -> ChatCompletionResponse:
        """Build the response of a request without `stream`. Prompt details are next to the choices, as in vLLM."""
        request = self.request
        response: ChatCompletionResponse = {
            "id": request.id,
            "object": "chat.completion",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": None,
            "choices": [self._choice(continuation) for continuation in self.chosen(continuations)],
            "usage": self.usage(continuations),
        }
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, continuations[0].prompt_logprobs, self.body.prompt_logprobs
            )
        if self.body.return_token_ids:
            response["prompt_token_ids"] = request.prompts[0].token_ids
        return response

    def empty_stream_response(self) -> ChatCompletionStreamResponse:
        """Build an event without choices."""
        return self._empty_stream_response.copy()

    def stream_responses(
        self, continuation: Continuation, chunk: GenerationChunk
    ) -> list[ChatCompletionStreamResponse]:
        """Build the stream's events for one chunk of the engine. An event with the role precedes the first."""
        choice: ChatStreamChoice = {
            "index": continuation.index,
            "delta": {"content": chunk.text},
            **self.ending(continuation),
            "logprobs": chat_logprobs(self.tokenizer, chunk.logprobs) if self.body.logprobs else None,
        }
        self._add_details(choice, chunk)
        event: ChatCompletionStreamResponse = {**self._empty_stream_response, "choices": [choice]}
        if continuation.index in self._begun:
            return [event]
        self._begun.add(continuation.index)
        first: ChatStreamChoice = {
            "index": continuation.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [{**self._empty_stream_response, "choices": [first]}, event]

    def _choice(self, continuation: Continuation) -> ChatChoice:
        choice: ChatChoice = {
            "index": continuation.index,
            "message": {"role": "assistant", "content": continuation.text, "refusal": None},
            **self.ending(continuation),
            "logprobs": chat_logprobs(self.tokenizer, continuation.logprobs) if self.body.logprobs else None,
        }
        self._add_details(choice, continuation)
        return choice

    def _add_details(self, choice: ChatChoice | ChatStreamChoice, part: Continuation | GenerationChunk) -> None:
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
        if self.body.trace is not None:
            choice["trace"] = trace_objects(self.tokenizer, part.traces)
