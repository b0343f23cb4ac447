"""SGLang's native routes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.messages import GenerationRequest
from logitship.server.errors import BadRequest, QueueFull, RequestRefused

from .auth import caller_of
from .body import JSONResponse, read_body
from .documentation import body_of
from .running import submit_all
from .sglang_answers import WEIGHT_VERSION, GenerateAnswer
from .sglang_generate import read_generate
from .sglang_schemas import AbortRequest, GenerateRequest
from .streaming import EventStream, answer_at_end

HEALTH_TIMEOUT = 20.0
"""Seconds that `/health_generate` waits for its token."""


def sglang_router(engine: AsyncEngine) -> APIRouter:
    """The routes, bound to `engine`."""
    router = APIRouter(tags=["SGLang"])
    limit = engine.config.max_request_bytes

    @router.post("/generate", openapi_extra=body_of(GenerateRequest))
    @router.put("/generate", openapi_extra=body_of(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Continue one prompt or several."""
        body = await read_body(request, GenerateRequest, limit)
        plan = await read_generate(engine, caller_of(request), body)
        answer = GenerateAnswer(plan, engine.tokenizer)
        running = await submit_all(engine, plan.submissions)
        if body.stream:
            return EventStream(running, answer.events(running))
        return await answer_at_end(request, running, answer.whole)

    @router.post("/abort_request", openapi_extra=body_of(AbortRequest))
    async def abort_request(request: Request) -> Response:
        """Cancel one request, or all of them: of the caller's own."""
        body = await read_body(request, AbortRequest, limit)
        if not body.rid and not body.abort_all:
            raise BadRequest("rid: name a request, or set abort_all", param="rid")
        engine.abort(None if body.abort_all else body.rid, caller_of(request).tenant)
        return Response()

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        """Drop what is cached between requests."""
        if await engine.flush_cache():
            return Response("Cache flushed.\n", media_type="text/plain")
        return Response("Nothing was flushed: requests are running or waiting.\n", 400, media_type="text/plain")

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        """The model."""
        return JSONResponse(_model_info(engine))

    @router.get("/get_server_info")
    @router.get("/server_info")
    async def server_info() -> Response:
        """The server's settings and what it is doing now."""
        return JSONResponse(_server_info(engine))

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine lives and takes requests, else 503."""
        return Response(status_code=200 if engine.healthy and engine.stats().accepting else 503)

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 if the engine generates a token, else 503."""
        return Response(status_code=200 if await _generates(engine) else 503)

    return router


def _model_info(engine: AsyncEngine) -> dict[str, Any]:
    model = engine.model
    return {
        "model_path": model.path,
        "tokenizer_path": engine.config.tokenizer_path or model.path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "architectures": [model.architecture],
        "served_model_name": model.name,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "eos_token_ids": sorted(model.eos_token_ids),
        "dtype": model.dtype,
        "device": model.device,
    }


def _server_info(engine: AsyncEngine) -> dict[str, Any]:
    config = asdict(engine.config)
    del config["api_key"], config["shipping_api_key"]
    # SGLang gives one internal state for each replica of the model; there is one here.
    return {
        **config,
        **_model_info(engine),
        "version": version("logitship"),
        "internal_states": [asdict(engine.stats())],
    }


async def _generates(engine: AsyncEngine) -> bool:
    request = GenerationRequest(
        rid=f"HEALTH_CHECK_{uuid4().hex}",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(temperature=0, max_tokens=1),
    )
    try:
        stream = await engine.submit(request)
    except QueueFull:
        return engine.healthy  # busy is not ill
    except RequestRefused:
        return False
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            async for chunk in stream:
                if chunk.token_ids:
                    return True
    except TimeoutError:
        return False
    finally:
        await stream.aclose()
    return False
