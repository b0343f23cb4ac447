"""OpenAI's routes, and the responses of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeAlias, TypedDict

from fastapi import APIRouter, Path, Request, Response

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.admission import check_model_name
from logitship.server.http.json_responses import trace_objects
from logitship.server.http.mask_objects import mask_fields
from logitship.server.http.receiving import received
from logitship.server.http.running_requests import (
    EventStream,
    RunningRequests,
    event,
    raise_if_failed,
    respond_when_finished,
    submit_all,
)
from logitship.server.requests.messages import Continuation, GenerationChunk, TokenLogprobs, best_continuations
from logitship.server.schemas.documentation import operation
from logitship.server.schemas.openai_response_schemas import (
    ChatChoice,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChatMessage,
    ChatStreamChoice,
    ChoiceEnding,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    CompletionStreamResponse,
    DeltaMessage,
    ModelCard,
    ModelList,
    UsageInfo,
)
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest
from logitship.server.schemas.response_schemas import SamplingMaskFields, receipt_objects
from logitship.server.schemas.responses_response_schemas import ResponseEvent, ResponseObject
from logitship.server.schemas.responses_schemas import ResponsesRequest
from logitship.server.uploads.refusal_responses import JSONResponse
from logitship.server.uploads.request_bodies import ReceivedBody
from logitship.server.uploads.upload_engine import caller_of

from .openai_logprobs import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from .openai_requests import (
    Body,
    ParsedOpenAIRequest,
    parse_chat_request,
    parse_completion_request,
    parse_responses_request,
)
from .responses_builder import ResponsesBuilder
from .tool_call_stream import ToolCallStream

ModelName = Annotated[str, Path(description="The model's name.", examples=["SmolLM2-135M-Instruct"])]

_COMPLETION = operation(
    body=CompletionRequest,
    body_example={"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
    response=CompletionResponse,
    stream=CompletionStreamResponse,
)
_CHAT = operation(
    body=ChatCompletionRequest,
    body_example={
        "messages": [{"role": "user", "content": "What is the moon?"}],
        "max_tokens": 16,
        "custom_logit_processor": {"name": "disallowed_tokens"},
        "custom_params": {"token_ids": [30]},
    },
    response=ChatCompletionResponse,
    stream=ChatCompletionStreamResponse,
)
_RESPONSES = operation(
    body=ResponsesRequest,
    body_example={
        "input": "What is the moon?",
        "max_output_tokens": 16,
        "custom_logit_processor": {"name": "disallowed_tokens"},
        "custom_params": {"token_ids": [30]},
    },
    response=ResponseObject,
    stream=ResponseEvent,
)


def openai_router(engine: AsyncEngine) -> APIRouter:
    """Create the routes for `engine`."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    started = int(time.time())

    @router.post("/completions", openapi_extra=_COMPLETION)
    async def completions(request: Request) -> Response:
        """Complete one or more prompts."""
        async with received(request, engine, CompletionRequest) as body:
            parsed = await parse_completion_request(engine, caller_of(request), body)
            return await _respond(engine, body, CompletionResponseBuilder(engine, parsed))

    @router.post("/chat/completions", openapi_extra=_CHAT)
    async def chat_completions(request: Request) -> Response:
        """Generate the next message of a conversation."""
        async with received(request, engine, ChatCompletionRequest) as body:
            parsed = await parse_chat_request(engine, caller_of(request), body)
            return await _respond(engine, body, ChatResponseBuilder(engine, parsed))

    @router.post("/responses", openapi_extra=_RESPONSES)
    async def responses(request: Request) -> Response:
        """Generate the next message of a conversation, in the format of OpenAI's newer route. Nothing is stored."""
        async with received(request, engine, ResponsesRequest) as body:
            parsed = await parse_responses_request(engine, caller_of(request), body)
            return await _respond(engine, body, ResponsesBuilder(engine, parsed, body.value))

    @router.get("/models", openapi_extra=operation(response=ModelList))
    async def models() -> Response:
        """List the models: there is one."""
        models: ModelList = {"object": "list", "data": [_model(engine, started)]}
        return JSONResponse(models)

    @router.get("/models/{name:path}", openapi_extra=operation(response=ModelCard))
    async def model(name: ModelName) -> Response:
        """Show the model."""
        check_model_name(engine, name)
        return JSONResponse(_model(engine, started))

    return router


async def _respond(
    engine: AsyncEngine, body: ReceivedBody[Any], builder: OpenAIResponseBuilder[Any] | ResponsesBuilder
) -> Response:
    running = await submit_all(engine, builder.request.submissions, body.queued)
    if body.value.stream:
        return EventStream(running, builder.stream(running))
    return await respond_when_finished(running, builder.response)


def _model(engine: AsyncEngine, created: int) -> ModelCard:
    model = engine.model
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "logitship",
        "root": model.path,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


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
        self._vocab_size = engine.model.vocab_size
        self._own_eos_token_ids = engine.model.eos_token_ids - frozenset(request.body.stop_token_ids)

    @abstractmethod
    def response(self, continuations: list[Continuation]) -> OpenAIResponse:
        """Build the response of a request without `stream`."""

    @abstractmethod
    def empty_stream_response(self) -> OpenAIStreamResponse:
        """Build an event without choices."""

    @abstractmethod
    def stream_responses(self, continuation: Continuation, chunk: GenerationChunk) -> Sequence[OpenAIStreamResponse]:
        """Build the stream's events for one chunk of the engine, with one choice each; none if it says nothing."""

    def has_details(self, chunk: GenerationChunk) -> bool:
        """Return whether a chunk without text says something: text is held back while a stop string is possible."""
        return (
            chunk.finish_reason is not None
            or bool(chunk.logprobs)
            or (self.body.return_token_ids and bool(chunk.token_ids))
            or bool(chunk.traces)
            or bool(chunk.masks)
        )

    async def stream(self, running: RunningRequests) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream.

        Raises:
            GenerationFailed: an error ended one of the continuations.
        """
        async for continuation, chunk in running.at_intervals():
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
        # vLLM's `stop_reason` names what the request asked to stop at; for the model's own EOS token it is null.
        matched = None if reason.matched in self._own_eos_token_ids else reason.matched
        ending: ChoiceEnding = {"finish_reason": reason.kind, "stop_reason": matched}
        if continuation.receipts:
            ending["receipts"] = receipt_objects(continuation.receipts)
        return ending

    def masks(self, continuation: Continuation, part: Continuation | GenerationChunk) -> SamplingMaskFields:
        """Build the sampling masks of a part of a choice, if the request asks for them."""
        params = self.request.submissions[continuation.prompt].request.sampling_params
        return mask_fields(params, self._vocab_size, part)

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


class CompletionResponseBuilder(OpenAIResponseBuilder[CompletionRequest]):
    """Builds OpenAI's text completion objects."""

    def __init__(self, engine: AsyncEngine, request: ParsedOpenAIRequest[CompletionRequest]) -> None:
        super().__init__(engine, request)
        self._text_offsets: dict[int, TextOffsets | None] = {}
        """Offsets of the continuations that have begun, by index; None without log-probabilities."""
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
        choice = self._choice(continuation, chunk)
        if not choice["text"] and not self.has_details(chunk):
            return []
        return [{**self._empty_stream_response, "choices": [choice]}]

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
        if first:
            self._text_offsets[continuation.index] = self._new_offsets(continuation)
        text = self._prompt_text(continuation) + part.text if first and self.body.echo else part.text
        ending = self.ending(continuation)
        choice: CompletionChoice = {
            "index": continuation.index,
            "text": text,
            "logprobs": self._logprobs(continuation, part.logprobs, with_prompt=first and self.body.echo),
            "finish_reason": ending["finish_reason"],
            "stop_reason": ending.get("stop_reason"),
        }
        if "receipts" in ending:
            choice["receipts"] = ending["receipts"]
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
            if first:
                choice["prompt_token_ids"] = self.request.prompts[continuation.prompt].token_ids
        choice.update(self.masks(continuation, part))  # type: ignore[typeddict-item]
        if self.body.trace is not None:
            choice["trace"] = trace_objects(self.tokenizer, part.traces)
        return choice

    def _new_offsets(self, continuation: Continuation) -> TextOffsets | None:
        if self.body.logprobs is None:
            return None
        return TextOffsets(
            self.tokenizer,
            self.request.prompts[continuation.prompt].token_ids,
            self._prompt_text(continuation) if self.body.echo else None,
            skip_special_tokens=self.body.skip_special_tokens,
            spaces_between_special_tokens=self.body.spaces_between_special_tokens,
        )

    def _logprobs(
        self, continuation: Continuation, positions: list[TokenLogprobs], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        offsets = self._text_offsets[continuation.index]
        if offsets is None or self.body.logprobs is None:
            return None
        of_prompt = continuation.prompt_logprobs if with_prompt else []
        begins = [*(offsets.of_prompt() if with_prompt else []), *(offsets.push(each.token_id) for each in positions)]
        return completion_logprobs(self.tokenizer, [*of_prompt, *positions], self.body.logprobs, begins)

    def _prompt_text(self, continuation: Continuation) -> str:
        prompt = self.request.prompts[continuation.prompt]
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


class ChatResponseBuilder(OpenAIResponseBuilder[ChatCompletionRequest]):
    """Builds OpenAI's chat completion objects."""

    def __init__(self, engine: AsyncEngine, request: ParsedOpenAIRequest[ChatCompletionRequest]) -> None:
        super().__init__(engine, request)
        self._begun: set[int] = set()
        self._tool_use = request.tool_use
        self._tool_streams: dict[int, ToolCallStream] = {}
        """By the index of the continuation."""
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
            "delta": self._delta(continuation, chunk),
            **self._chat_ending(continuation),
            "logprobs": chat_logprobs(self.tokenizer, chunk.logprobs) if self.body.logprobs else None,
        }
        self._add_details(choice, continuation, chunk)
        events: list[ChatCompletionStreamResponse] = [{**self._empty_stream_response, "choices": [choice]}]
        if not any(choice["delta"].values()) and not self.has_details(chunk):
            events = []
        if continuation.index in self._begun:
            return events
        self._begun.add(continuation.index)
        first: ChatStreamChoice = {
            "index": continuation.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [{**self._empty_stream_response, "choices": [first]}, *events]

    def _choice(self, continuation: Continuation) -> ChatChoice:
        choice: ChatChoice = {
            "index": continuation.index,
            "message": self._message(continuation),
            **self._chat_ending(continuation),
            "logprobs": chat_logprobs(self.tokenizer, continuation.logprobs) if self.body.logprobs else None,
        }
        self._add_details(choice, continuation, continuation)
        return choice

    def _message(self, continuation: Continuation) -> ChatMessage:
        if self._tool_use is None:
            return {"role": "assistant", "content": continuation.text, "refusal": None}
        calls = ToolCallStream(self._tool_use)
        self._tool_streams[continuation.index] = calls
        return calls.message(continuation.text)

    def _delta(self, continuation: Continuation, chunk: GenerationChunk) -> DeltaMessage:
        if self._tool_use is None:
            return {"content": chunk.text}
        calls = self._tool_streams.get(continuation.index)
        if calls is None:
            calls = self._tool_streams[continuation.index] = ToolCallStream(self._tool_use)
        return calls.delta(chunk.text, is_last=chunk.finish_reason is not None)

    def _chat_ending(self, continuation: Continuation) -> ChoiceEnding:
        ending = self.ending(continuation)
        calls = self._tool_streams.get(continuation.index)
        # As in OpenAI, the reason stays `stop` if tool_choice names a function.
        if ending["finish_reason"] == "stop" and calls is not None and calls.num_calls and calls.use.choice != "named":
            ending["finish_reason"] = "tool_calls"
        return ending

    def _add_details(
        self,
        choice: ChatChoice | ChatStreamChoice,
        continuation: Continuation,
        part: Continuation | GenerationChunk,
    ) -> None:
        if self.body.return_token_ids:
            choice["token_ids"] = part.token_ids
        choice.update(self.masks(continuation, part))  # type: ignore[typeddict-item]
        if self.body.trace is not None:
            choice["trace"] = trace_objects(self.tokenizer, part.traces)
