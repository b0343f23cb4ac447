"""SGLang's native routes; that of `/generate` is in `generate_route`."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.receiving import received
from logitship.server.refusals import BadRequest, QueueFull, RequestRefused
from logitship.server.requests.messages import GenerationRequest
from logitship.server.schemas.documentation import operation
from logitship.server.schemas.sglang_response_schemas import ModelInfoResponse
from logitship.server.schemas.sglang_schemas import AbortRequest
from logitship.server.uploads.refusal_responses import JSONResponse
from logitship.server.uploads.upload_engine import caller_of

from .generate_route import add_generate_route
from .server_info import model_info_of, server_info_of, server_info_schema

HEALTH_TIMEOUT = 20.0
"""Seconds that `/health_generate` waits for a token."""


def sglang_router(engine: AsyncEngine) -> APIRouter:
    """Create the routes for `engine`."""
    router = APIRouter(tags=["SGLang"])
    add_generate_route(router, engine)

    @router.post("/abort_request", openapi_extra=operation(body=AbortRequest, body_example={"rid": "first"}))
    async def abort_request(request: Request) -> Response:
        """Cancel one or all of the caller's requests."""
        async with received(request, engine, AbortRequest) as received_body:
            body = received_body.value
        if not body.rid and not body.abort_all:
            raise BadRequest("rid: name a request, or set abort_all", param="rid")
        engine.abort(None if body.abort_all else body.rid, caller_of(request).tenant)
        return Response()

    @router.get("/flush_cache", openapi_extra=operation(text="Cache flushed.\n"))
    @router.post("/flush_cache", openapi_extra=operation(text="Cache flushed.\n"))
    async def flush_cache() -> Response:
        """Clear the caches that outlive requests."""
        if await engine.flush_cache():
            return Response("Cache flushed.\n", media_type="text/plain")
        return Response("Cache not flushed: requests are running or waiting.\n", 400, media_type="text/plain")

    @router.get("/get_model_info", openapi_extra=operation(response=ModelInfoResponse))
    @router.get("/model_info", openapi_extra=operation(response=ModelInfoResponse))
    async def model_info() -> Response:
        """Show the model."""
        return JSONResponse(model_info_of(engine))

    @router.get("/get_server_info", openapi_extra=operation(response=server_info_schema()))
    @router.get("/server_info", openapi_extra=operation(response=server_info_schema()))
    async def server_info() -> Response:
        """Show the server's settings and state."""
        return JSONResponse(server_info_of(engine))

    @router.get("/health", openapi_extra=operation())
    async def health() -> Response:
        """Return 200 while the engine is alive and accepts requests, else 503."""
        return Response(status_code=200 if engine.healthy and engine.accepting else 503)

    @router.get("/health/ready", openapi_extra=operation())
    async def ready() -> Response:
        """Return 200 if a request could be admitted and stepped now, else 503 with the reasons."""
        await engine.check_ready()
        return Response()

    @router.get("/health_generate", openapi_extra=operation())
    async def health_generate() -> Response:
        """Return 200 if the engine can generate a token, else 503."""
        return Response(status_code=200 if await _generates(engine) else 503)

    return router


async def _generates(engine: AsyncEngine) -> bool:
    request = GenerationRequest(
        rid=f"HEALTH_CHECK_{uuid4().hex}",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(temperature=0, max_tokens=1),
    )
    try:
        stream = await engine.submit(request)
    except QueueFull:
        return engine.healthy  # busy, but alive
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
