"""`/v1/completions` on its way out."""

from __future__ import annotations

from typing import Any

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.trace_answers import trace_objects
from logitship.server.requests.continuation import Continuation
from logitship.server.requests.messages import GenerationChunk
from logitship.server.schemas.openai_schemas import CompletionRequest

from .openai_answers import OpenAIAnswer
from .openai_logprobs import completion_logprobs, prompt_logprobs
from .openai_requests import OpenAIRequest


class CompletionAnswer(OpenAIAnswer[CompletionRequest]):
    """OpenAI's text completion objects."""

    object = "text_completion"
    event_object = "text_completion"

    def __init__(self, engine: AsyncEngine, request: OpenAIRequest[CompletionRequest]) -> None:
        super().__init__(engine, request)
        self._text_offsets: dict[int, int] = {}
        """Of each continuation that has begun, the characters of its tokens so far."""

    def choice(self, continuation: Continuation) -> dict[str, Any]:
        """A choice of the whole answer."""
        choice = self._part(continuation, continuation)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, continuation.prompt_logprobs, self.body.prompt_logprobs
            )
        return choice

    def event_choices(self, continuation: Continuation, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """What a chunk brings."""
        return [self._part(continuation, chunk)]

    def _part(self, continuation: Continuation, part: Continuation | GenerationChunk) -> dict[str, Any]:
        """A choice with this much of the output; the first part also holds what belongs to the prompt."""
        first = continuation.index not in self._text_offsets
        offset = self._text_offsets.setdefault(continuation.index, 0)
        text, logprobs = part.text, part.logprobs
        if first and self.body.echo:
            text = self._prompt_text(continuation) + text
            logprobs = [*continuation.prompt_logprobs, *logprobs]
        choice: dict[str, Any] = {
            "index": continuation.index,
            "text": text,
            "logprobs": None,
            **self.ending(continuation),
        }
        if self.body.logprobs is not None:
            choice["logprobs"] = completion_logprobs(self.tokenizer, logprobs, self.body.logprobs, offset)
            self._text_offsets[continuation.index] += sum(len(token) for token in choice["logprobs"]["tokens"])
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
