"""`/v1/chat/completions` on its way out."""

from __future__ import annotations

from typing import Any

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.trace_answers import trace_objects
from logitship.server.requests.continuation import Continuation
from logitship.server.requests.messages import GenerationChunk
from logitship.server.schemas.openai_schemas import ChatCompletionRequest

from .openai_answers import OpenAIAnswer
from .openai_logprobs import chat_logprobs, prompt_logprobs
from .openai_requests import OpenAIRequest


class ChatAnswer(OpenAIAnswer[ChatCompletionRequest]):
    """OpenAI's chat completion objects."""

    object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, engine: AsyncEngine, request: OpenAIRequest[ChatCompletionRequest]) -> None:
        super().__init__(engine, request)
        self._begun: set[int] = set()

    def whole(self, continuations: list[Continuation]) -> dict[str, Any]:
        """The answer as one object. What belongs to the prompt stands beside the choices, as vLLM has it."""
        answer = super().whole(continuations)
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, continuations[0].prompt_logprobs, self.body.prompt_logprobs
            )
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.request.prompts[0].token_ids
        return answer

    def choice(self, continuation: Continuation) -> dict[str, Any]:
        """A choice of the whole answer."""
        return {
            "index": continuation.index,
            "message": {"role": "assistant", "content": continuation.text, "refusal": None},
            **self._about(continuation, continuation),
        }

    def event_choices(self, continuation: Continuation, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """What a chunk brings. An event with the role alone goes before the first."""
        choices = []
        if continuation.index not in self._begun:
            self._begun.add(continuation.index)
            delta = {"role": "assistant", "content": ""}
            choices.append({"index": continuation.index, "delta": delta, "logprobs": None, "finish_reason": None})
        about = self._about(continuation, chunk)
        choices.append({"index": continuation.index, "delta": {"content": chunk.text}, **about})
        return choices

    def _about(self, continuation: Continuation, part: Continuation | GenerationChunk) -> dict[str, Any]:
        fields = self.ending(continuation)
        fields["logprobs"] = chat_logprobs(self.tokenizer, part.logprobs) if self.body.logprobs else None
        if self.body.return_token_ids:
            fields["token_ids"] = part.token_ids
        if self.body.trace is not None:
            fields["trace"] = trace_objects(self.tokenizer, part.traces)
        return fields
