"""What the answers of both OpenAI routes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from typing import Any, Generic

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.event_stream import event
from logitship.server.http.running_requests import RunningRequests, raise_if_failed
from logitship.server.requests.continuation import Continuation, best_continuations
from logitship.server.requests.messages import GenerationChunk

from .openai_requests import Body, OpenAIRequest


class OpenAIAnswer(ABC, Generic[Body]):
    """Makes the answer to one request, whole or event by event."""

    object: str
    """The answer's type."""
    event_object: str
    """The type of an event."""

    def __init__(self, engine: AsyncEngine, request: OpenAIRequest[Body]) -> None:
        self.request = request
        self.body = request.body
        self.tokenizer = engine.tokenizer
        self._end_tokens = engine.model.eos_token_ids - frozenset(request.body.stop_token_ids)

    @abstractmethod
    def choice(self, continuation: Continuation) -> dict[str, Any]:
        """A choice of the whole answer."""

    @abstractmethod
    def event_choices(self, continuation: Continuation, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """What a chunk brings: one choice an event."""

    def whole(self, continuations: list[Continuation]) -> dict[str, Any]:
        """The answer as one object."""
        return {
            **self._head(self.object),
            "choices": [self.choice(continuation) for continuation in self._answered(continuations)],
            "usage": self._usage(continuations),
        }

    async def events(self, running: RunningRequests) -> AsyncGenerator[bytes, None]:
        """The answer as events.

        Raises:
            GenerationFailed: an error ended one of the continuations.
        """
        head = self._head(self.event_object)
        if self.body.usage_at_end:
            head["usage"] = None  # OpenAI: present in every event, and null in all but the last
        async for continuation, chunk in running:
            raise_if_failed(continuation)
            for choice in self.event_choices(continuation, chunk):
                data = {**head, "choices": [choice]}
                if self.body.usage_in_each_event:
                    data["usage"] = self._usage([continuation])
                yield event(data)
        if self.body.usage_at_end:
            yield event({**head, "choices": [], "usage": self._usage(running.continuations)})

    def ending(self, continuation: Continuation) -> dict[str, Any]:
        """The fields of a choice that say why it ended; all null while it runs."""
        reason = continuation.finish_reason
        if reason is None:
            return {"finish_reason": None, "stop_reason": None}
        # vLLM's `stop_reason` names what the request asked to stop at; the model's own end is null.
        matched = None if reason.matched in self._end_tokens else reason.matched
        fields: dict[str, Any] = {"finish_reason": reason.kind, "stop_reason": matched}
        if continuation.receipts:
            fields["receipts"] = [asdict(receipt) for receipt in continuation.receipts]
        return fields

    def _answered(self, continuations: Sequence[Continuation]) -> Sequence[Continuation]:
        """The continuations that become choices, with their places in the answer."""
        made, n = self.body.num_continuations, self.body.n
        if made == n:
            return continuations
        of_prompts = (continuations[first : first + made] for first in range(0, len(continuations), made))
        best = [continuation for of_prompt in of_prompts for continuation in best_continuations(of_prompt, n)]
        return [replace(continuation, index=index) for index, continuation in enumerate(best)]

    def _head(self, kind: str) -> dict[str, Any]:
        request = self.request
        return {
            "id": request.id,
            "object": kind,
            "created": request.created,
            "model": request.model,
            "system_fingerprint": None,
        }

    def _usage(self, continuations: Sequence[Continuation]) -> dict[str, Any]:
        """Token counts. A prompt counts once, however many continuations it has: as the first of them saw it.

        What `best_of` leaves out counts too: it was generated.
        """
        of_prompt = {continuation.prompt: continuation for continuation in reversed(continuations)}.values()
        prompt = sum(continuation.prompt_tokens for continuation in of_prompt)
        completion = sum(continuation.completion_tokens for continuation in continuations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in of_prompt)},
        }
