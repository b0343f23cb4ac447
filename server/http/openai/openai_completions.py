"""Responses of `/v1/completions`."""

from __future__ import annotations

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.response_objects import trace_objects
from logitship.server.requests.continuation import Continuation
from logitship.server.requests.messages import GenerationChunk
from logitship.server.schemas.openai_response_schemas import (
    CompletionChoice,
    CompletionResponse,
    CompletionStreamResponse,
)
from logitship.server.schemas.openai_schemas import CompletionRequest

from .openai_logprobs import completion_logprobs, prompt_logprobs
from .openai_requests import ParsedOpenAIRequest
from .openai_response_builder import OpenAIResponseBuilder


class CompletionResponseBuilder(OpenAIResponseBuilder[CompletionRequest]):
    """Builds OpenAI's text completion objects."""

    def __init__(self, engine: AsyncEngine, request: ParsedOpenAIRequest[CompletionRequest]) -> None:
        super().__init__(engine, request)
        self._text_offsets: dict[int, int] = {}
        """Characters of the tokens so far, by the index of the continuation."""
        self._empty_stream_response: CompletionStreamResponse = {
            "id": request.id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": None,
            **self.null_usage(),
            "choices": [],
        }

    def response(self, continuations: list[Continuation]) -> CompletionResponse:
        """Build the response of a request without `stream`."""
        request = self.request
        return {
            "id": request.id,
            "object": "text_completion",
            "created": request.created,
            "model": request.model,
            "system_fingerprint": None,
            "choices": [self._whole_choice(continuation) for continuation in self.chosen(continuations)],
            "usage": self.usage(continuations),
        }

    def empty_stream_response(self) -> CompletionStreamResponse:
        """Build an event without choices."""
        return self._empty_stream_response.copy()

    def stream_responses(self, continuation: Continuation, chunk: GenerationChunk) -> list[CompletionStreamResponse]:
        """Build the stream's event for one chunk of the engine."""
        return [{**self._empty_stream_response, "choices": [self._choice(continuation, chunk)]}]

    def _whole_choice(self, continuation: Continuation) -> CompletionChoice:
        choice = self._choice(continuation, continuation)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, continuation.prompt_logprobs, self.body.prompt_logprobs
            )
        return choice

    def _choice(self, continuation: Continuation, part: Continuation | GenerationChunk) -> CompletionChoice:
        """Build a choice with a part of the output; the first part also has what belongs to the prompt."""
        first = continuation.index not in self._text_offsets
        offset = self._text_offsets.setdefault(continuation.index, 0)
        text, positions = part.text, part.logprobs
        if first and self.body.echo:
            text = self._prompt_text(continuation) + text
            positions = [*continuation.prompt_logprobs, *positions]
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(self.tokenizer, positions, self.body.logprobs, offset)
            self._text_offsets[continuation.index] += sum(len(token) for token in logprobs["tokens"])
        ending = self.ending(continuation)
        choice: CompletionChoice = {
            "index": continuation.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": ending["finish_reason"],
            "stop_reason": ending.get("stop_reason"),
        }
        if "receipts" in ending:
            choice["receipts"] = ending["receipts"]
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if first:
                choice["prompt_token_ids"] = self.request.prompts[continuation.prompt].token_ids
        if self.body.trace is not None:
            choice["trace"] = trace_objects(self.tokenizer, part.traces)
        return choice

    def _prompt_text(self, continuation: Continuation) -> str:
        prompt = self.request.prompts[continuation.prompt]
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
