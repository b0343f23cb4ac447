"""Parsing of OpenAI's request bodies into the engine's requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from uuid import uuid4

from logitship.server.api_keys import Caller
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.admission import (
    ParsedProcessors,
    check_batch,
    check_model_name,
    check_processor_lists,
    max_tokens_within_model,
    read_processors,
    read_prompt,
    sampling_params,
)
from logitship.server.http.running_requests import Submission
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import GenerationRequest
from logitship.server.requests.request_validation import Prompt
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest, OpenAIFields
from logitship.server.schemas.responses_schemas import ResponsesRequest
from logitship.server.schemas.structured_outputs import constraint_of
from logitship.server.uploads.request_bodies import ReceivedBody

from .chat_prompt import render_chat, used_options
from .tool_use import ToolUse, tool_use_of

Body = TypeVar("Body", bound=OpenAIFields)

_NAMES = {
    "bad_words_token_ids": "bad_words",
    "extra_args": "vllm_xargs",
}


@dataclass(frozen=True)
class ParsedOpenAIRequest(Generic[Body]):
    """A parsed request body.

    Attributes:
        id: id of the response.
        model: name of the model, for the response.
        body: the validated body.
        prompts: the prompts.
        submissions: one per prompt.
        tool_use: how its tools are used, if it has any.
        created: Unix time, in seconds.
    """

    id: str
    model: str
    body: Body
    prompts: list[Prompt]
    submissions: list[Submission]
    tool_use: ToolUse | None = None
    created: int = field(default_factory=lambda: int(time.time()))


async def parse_completion_request(
    engine: AsyncEngine, caller: Caller, received: ReceivedBody[CompletionRequest]
) -> ParsedOpenAIRequest[CompletionRequest]:
    """Validate what the schema cannot, tokenize, and build the engine's requests.

    Raises:
        RequestRefused: names the field.
    """
    body, work = received.value, received.work
    check_model_name(engine, body.model)
    is_batch = isinstance(body.prompt, list) and not (body.prompt and isinstance(body.prompt[0], int))
    given: list[Any] = body.prompt if is_batch and isinstance(body.prompt, list) else [body.prompt]
    check_batch(engine.config, len(given), "prompt", *_sequences_of_a_prompt(body))
    if is_batch:
        check_processor_lists(body, len(given))
    constraint = constraint_of(body)
    request_id = _request_id(body, "cmpl")
    request = ParsedOpenAIRequest(request_id, engine.model.name, body, [], [])
    for i, value in enumerate(given):
        parsed = await work.run_if_large(
            read_processors,
            engine,
            caller,
            body,
            i if is_batch else None,
            body.custom_params,
            "custom_params",
            constraint,
        )
        names = {**_names(body), **parsed.names, "prompt": f"prompt[{i}]" if is_batch else "prompt"}
        prompt = await read_prompt(engine, work, value, names["prompt"], add_special_tokens=body.add_special_tokens)
        request.prompts.append(prompt)
        request.submissions.append(
            await _submission(
                engine,
                caller,
                received,
                prompt,
                names,
                f"{request_id}_{i}" if is_batch else request_id,
                request_id if is_batch else None,
                parsed,
                max_tokens=max_tokens_within_model(engine, prompt, body, "max_tokens"),
                logprobs=body.logprobs,
                prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
            )
        )
    return request


async def parse_responses_request(
    engine: AsyncEngine, caller: Caller, received: ReceivedBody[ResponsesRequest]
) -> ParsedOpenAIRequest[ChatCompletionRequest]:
    """Parse the body of `/v1/responses` as a conversation.

    Raises:
        RequestRefused: names the field.
    """
    chat = ReceivedBody[ChatCompletionRequest](received.value.chat, received.work, received.queued, received.ignored)
    names = {
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }
    return await parse_chat_request(engine, caller, chat, prefix="resp", names=names)


async def parse_chat_request(
    engine: AsyncEngine,
    caller: Caller,
    received: ReceivedBody[ChatCompletionRequest],
    *,
    prefix: str = "chatcmpl",
    names: Mapping[str, str] = MappingProxyType({}),
) -> ParsedOpenAIRequest[ChatCompletionRequest]:
    """Parse a conversation, which the chat template renders as one prompt.

    Args:
        engine: the engine.
        caller: who sent the request.
        received: the body.
        prefix: of the id of the response.
        names: the client's names of fields, where they differ.

    Raises:
        RequestRefused: names the field.
    """
    body, work = received.value, received.work
    check_model_name(engine, body.model)
    check_batch(engine.config, 1, "messages", *_sequences_of_a_prompt(body))
    request_id = _request_id(body, prefix)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    tool_use = tool_use_of(engine, body)
    constraint = constraint_of(body) if tool_use is None else tool_use.constraint
    parsed = await work.run_if_large(
        read_processors, engine, caller, body, None, body.custom_params, "custom_params", constraint
    )
    all_names = {
        **_names(body),
        **parsed.names,
        "max_tokens": limit_name,
        "logprobs": "top_logprobs",
        "prompt": "messages",
        **names,
    }
    prompt = Prompt(await _render(engine, received, all_names))
    if not prompt.token_ids:
        field = all_names["prompt"]
        raise BadRequest(f"{field}: the chat template renders it as an empty prompt", param=field)
    submission = await _submission(
        engine,
        caller,
        received,
        prompt,
        all_names,
        request_id,
        None,
        parsed,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        **_tool_params(body, tool_use),
    )
    return ParsedOpenAIRequest(request_id, engine.model.name, body, [prompt], [submission], tool_use)


def _tool_params(body: ChatCompletionRequest, tool_use: ToolUse | None) -> dict[str, Any]:
    """Return the sampling parameters that differ with tools: some models write calls with special tokens."""
    if tool_use is None or "skip_special_tokens" in body.model_fields_set:
        return {}
    return {"skip_special_tokens": False}


def _request_id(body: OpenAIFields, prefix: str) -> str:
    return body.rid or body.request_id or f"{prefix}-{uuid4().hex}"


def _sequences_of_a_prompt(body: OpenAIFields) -> tuple[int, str]:
    """Return the number of sequences per prompt, and the field that sets it."""
    if (body.num_beams or 1) > body.num_continuations:
        return body.num_beams or 1, "num_beams"
    return body.num_continuations, body.n_field if body.best_of is None else "best_of"


def _names(body: OpenAIFields) -> dict[str, str]:
    own = {"rid": "request_id" if body.rid is None else "rid", "n": body.n_field}
    if body.no_stop_trim:
        own["include_stop_str_in_output"] = "no_stop_trim"
    if body.num_beams is None and body.use_beam_search:
        own["num_beams"] = body.n_field
    return _NAMES | own


def _most(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)


async def _render(
    engine: AsyncEngine, received: ReceivedBody[ChatCompletionRequest], names: Mapping[str, str]
) -> list[int]:
    body = received.value
    options = used_options(engine, body.template_options, received.ignored, names)
    return await render_chat(
        engine,
        received.work,
        body.messages,
        at=names["prompt"],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.template_tools,
        variables=options | body.chat_template_kwargs,
    )


async def _submission(
    engine: AsyncEngine,
    caller: Caller,
    received: ReceivedBody[Body],
    prompt: Prompt,
    names: Mapping[str, str],
    rid: str,
    batch_rid: str | None,
    parsed: ParsedProcessors,
    **values: Any,
) -> Submission:
    body = received.value
    params = await sampling_params(
        engine,
        received.work,
        body,
        names,
        min_tokens=body.min_tokens,
        seed=body.seed,
        include_stop_str_in_output=body.include_stop_str_in_output or body.no_stop_trim,
        thinking_token_budget=body.thinking_token_budget,
        extra_args=body.vllm_xargs or None,
        return_sampling_mask=body.return_sampling_mask,
        sampling_mask_format=body.sampling_mask_format,
        return_sampling_edits=body.return_sampling_edits,
        sampling_logprobs_mode=body.sampling_logprobs_mode,
        trace=body.trace and body.trace.top,
        **values,
    )
    request = GenerationRequest(
        rid=rid,
        tenant=caller.tenant,
        batch_rid=batch_rid,
        prompt_token_ids=prompt.token_ids,
        sampling_params=params,
        processors=parsed.processors,
        n=body.n,
        best_of=body.best_of,
        beam_search=body.beam_search,
    )
    return Submission(request, names, body.stream_interval)
