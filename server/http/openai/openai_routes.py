"""OpenAI's routes."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.admission import check_model_name
from logitship.server.http.auth import caller_of
from logitship.server.http.documentation import operation
from logitship.server.http.json_responses import JSONResponse
from logitship.server.http.receiving import ReceivedBody, received
from logitship.server.http.running_requests import EventStream, respond_when_finished, submit_all
from logitship.server.schemas.openai_response_schemas import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    ModelCard,
    ModelList,
)
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest
from logitship.server.schemas.responses_response_schemas import ResponseEvent, ResponseObject
from logitship.server.schemas.responses_schemas import ResponsesRequest

from .openai_requests import parse_chat_request, parse_completion_request, parse_responses_request
from .openai_response_builder import ChatResponseBuilder, CompletionResponseBuilder, OpenAIResponseBuilder
from .responses_builder import ResponsesBuilder

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
