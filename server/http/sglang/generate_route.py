"""`/generate`: the route, and its responses with SGLang's fields."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from fastapi import APIRouter, Request, Response

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.json_responses import fault_details, finite, trace_objects
from logitship.server.http.mask_objects import listed_logprobs, listed_tokens, packed_masks
from logitship.server.http.receiving import received
from logitship.server.http.running_requests import (
    EventStream,
    RunningRequests,
    event,
    respond_when_finished,
    submit_all,
)
from logitship.server.requests.messages import Continuation, FinishReason, GenerationChunk, TokenLogprobs
from logitship.server.schemas.documentation import one_or_more, operation
from logitship.server.schemas.response_schemas import TokenTraceObject, receipt_objects
from logitship.server.schemas.sglang_response_schemas import (
    AbortReason,
    GenerateResponse,
    LengthReason,
    MetaInfo,
    StopReason,
    TokenLogprobEntry,
)
from logitship.server.schemas.sglang_schemas import GenerateRequest
from logitship.server.tokenizer import Tokenizer
from logitship.server.uploads.upload_engine import caller_of

from .sglang_generate import ParsedGenerateRequest, parse_generate_request

WEIGHT_VERSION = "default"

_GENERATE = operation(
    body=GenerateRequest,
    body_example={
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "rid": "first",
    },
    response=one_or_more(GenerateResponse),
    stream=GenerateResponse,
)


def add_generate_route(router: APIRouter, engine: AsyncEngine) -> None:
    """Add the route for `engine`."""

    @router.post("/generate", openapi_extra=_GENERATE)
    @router.put("/generate", openapi_extra=_GENERATE)
    async def generate(request: Request) -> Response:
        """Complete one or more prompts."""
        async with received(request, engine, GenerateRequest) as body:
            parsed = await parse_generate_request(engine, caller_of(request), body)
            builder = GenerateResponseBuilder(parsed, engine.tokenizer, engine.model.vocab_size)
            running = await submit_all(engine, parsed.submissions, body.queued)
            if body.value.stream:
                return EventStream(running, builder.stream(running))
            return await respond_when_finished(running, builder.response)


class GenerateResponseBuilder:
    """Builds the response to one `/generate` request, whole or as a stream."""

    def __init__(self, request: ParsedGenerateRequest, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._started = time.perf_counter()
        self._tables: dict[int, _LogprobTables] = {}
        self._traces: dict[int, list[TokenTraceObject]] = {}
        self._masks: dict[int, _MaskLists] = {}

    def response(self, continuations: list[Continuation]) -> GenerateResponse | list[GenerateResponse]:
        """Build the response: one object, or a list of them."""
        objects = [self._object(continuation, continuation) for continuation in continuations]
        return objects if self._request.many else objects[0]

    async def stream(self, running: RunningRequests) -> AsyncGenerator[bytes, None]:
        """Yield one encoded event per chunk, each with the whole output of its continuation so far."""
        async for continuation, chunk in running.at_intervals():
            data = self._object(continuation, chunk)
            if self._request.many:
                data["index"] = continuation.index
            yield event(data)

    def _object(self, continuation: Continuation, new: Continuation | GenerationChunk) -> GenerateResponse:
        return {
            "text": continuation.text,
            "output_ids": continuation.token_ids,
            "meta_info": self._meta_info(continuation, new),
        }

    def _meta_info(self, continuation: Continuation, new: Continuation | GenerationChunk) -> MetaInfo:
        reason = continuation.finish_reason
        meta: MetaInfo = {
            "id": self._request.rids[continuation.index],
            "finish_reason": None if reason is None else _finish_reason(reason, continuation.completion_tokens),
            "prompt_tokens": continuation.prompt_tokens,
            "weight_version": WEIGHT_VERSION,
            "num_retractions": 0,  # requests are never preempted
            "reasoning_tokens": 0,  # reasoning is not parsed
            "completion_tokens": continuation.completion_tokens,
            "cached_tokens": continuation.cached_tokens,
        }
        params = self._request.submissions[continuation.prompt].request.sampling_params
        if params.logprobs is not None:
            tables = self._tables.setdefault(
                continuation.index,
                _LogprobTables(
                    self._tokenizer if self._request.texts_in_logprobs else None,
                    with_top=params.logprobs > 0,
                    with_requested=bool(params.logprob_token_ids),
                ),
            )
            tables.update(continuation)
            tables.add_to(meta)
        if params.return_sampling_mask:
            if params.sampling_mask_format == "packed":
                meta["sampling_record"] = packed_masks(params, self._vocab_size, new)
            else:
                self._masks.setdefault(continuation.index, _MaskLists(params)).add_to(meta, continuation)
        if params.trace is not None:
            # Cached, because each event repeats all of them.
            objects = self._traces.setdefault(continuation.index, [])
            objects += trace_objects(self._tokenizer, continuation.traces[len(objects) :])
            meta["trace"] = objects
        if continuation.receipts:
            meta["receipts"] = receipt_objects(continuation.receipts)
        if continuation.beam_score is not None and continuation.cumulative_logprob is not None:
            meta["cumulative_logprob"] = continuation.cumulative_logprob
            meta["beam_score"] = continuation.beam_score
        if reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started
        return meta


def _finish_reason(reason: FinishReason, completion_tokens: int) -> StopReason | LengthReason | AbortReason:
    if reason.kind == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.kind == "length":
        return {"type": "length", "length": completion_tokens}
    error = reason.error
    if error is None:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {
        "type": "abort",
        "message": error.message,
        "status_code": error.status_code,
        "err_type": error.type,
        **fault_details(error),
    }


class _MaskLists:
    """SGLang's lists of the sampling masks of one continuation. Cached, because each event repeats all of them."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._tokens: list[list[int]] = []
        self._logprobs: list[Any] = []

    def add_to(self, meta: MetaInfo, continuation: Continuation) -> None:
        """Set the lists in `meta_info`, with the masks of the new tokens."""
        new = continuation.masks[len(self._tokens) :]
        self._tokens += listed_tokens(new)
        self._logprobs += listed_logprobs(self._params, new)
        meta["output_token_sampling_mask"] = self._tokens
        meta["output_token_sampling_logprobs"] = self._logprobs
        meta["output_token_sampling_mask_length"] = len(self._tokens)


_Side: TypeAlias = Literal["input", "output"]


class _LogprobTables:
    """SGLang's log-probability lists of one continuation, with entries `[logprob, token id, text or null]`.

    Cached, because each event of a stream repeats all entries.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, with_top: bool, with_requested: bool) -> None:
        self._tokenizer = tokenizer
        self._with_top = with_top
        self._with_requested = with_requested
        self._tokens: dict[_Side, list[TokenLogprobEntry]] = {"input": [], "output": []}
        self._top: dict[_Side, list[list[TokenLogprobEntry] | None]] = {"input": [], "output": []}
        self._requested: dict[_Side, list[list[TokenLogprobEntry] | None]] = {"input": [], "output": []}

    def update(self, continuation: Continuation) -> None:
        """Append the entries of the new tokens."""
        self._extend("input", continuation.prompt_logprobs)
        self._extend("output", continuation.logprobs)

    def add_to(self, meta: MetaInfo) -> None:
        """Set the lists in `meta_info`."""
        meta["input_token_logprobs"] = self._tokens["input"]
        meta["output_token_logprobs"] = self._tokens["output"]
        meta["output_token_logprobs_length"] = len(self._tokens["output"])
        if self._with_top:
            meta["input_top_logprobs"] = self._top["input"]
            meta["output_top_logprobs"] = self._top["output"]
        if self._with_requested:
            meta["input_token_ids_logprobs"] = self._requested["input"]
            meta["output_token_ids_logprobs"] = self._requested["output"]

    def _extend(self, side: _Side, positions: Sequence[TokenLogprobs]) -> None:
        for position in positions[len(self._tokens[side]) :]:
            if side == "input" and not self._tokens["input"]:
                # SGLang sends null for the first position, wherever it is: clients sum up the others.
                position = TokenLogprobs(position.token_id, None, None)
            self._tokens[side].append(self._entry(position.logprob, position.token_id))
            self._top[side].append(self._entries(position.top))
            self._requested[side].append(self._entries(position.requested))

    def _entries(self, logprobs: Iterable[tuple[int, float]]) -> list[TokenLogprobEntry] | None:
        return [self._entry(logprob, token_id) for token_id, logprob in logprobs] or None

    def _entry(self, logprob: float | None, token_id: int) -> tuple[float | None, int, str | None]:
        return finite(logprob), token_id, None if self._tokenizer is None else self._tokenizer.token_text(token_id)
