"""The pooling routes of vLLM and SGLang. A generative model refuses them with vLLM's message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request

from logitship.builtin_processors.batch_processors import STR_POOLING_REJECTS_LOGITSPROCS
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest

from .receiving import received_json

_APIS = {
    "/v1/embeddings": "Embeddings",
    "/pooling": "Pooling",
    "/classify": "Classification",
    "/score": "Score",
    "/v1/score": "Score",
    "/rerank": "Rerank (Score)",
    "/v1/rerank": "Rerank (Score)",
    "/v2/rerank": "Rerank (Score)",
}
_PROCESSOR_FIELDS = ("custom_logit_processor", "logits_processors")


def pooling_router(engine: AsyncEngine) -> APIRouter:
    """Create the routes for `engine`."""
    router = APIRouter(tags=["Pooling"])
    for path, api in _APIS.items():
        router.add_api_route(path, _refusal(engine, api), methods=["POST"], include_in_schema=False)
    return router


def _refusal(engine: AsyncEngine, api: str) -> Callable[[Request], Awaitable[None]]:
    async def refuse(request: Request) -> None:
        async with received_json(request, engine, _processor_field) as body:
            field = body.value
        if field is not None:
            raise BadRequest(f"{field}: {STR_POOLING_REJECTS_LOGITSPROCS}", param=field)
        raise BadRequest(f"The model does not support {api} API")

    return refuse


def _processor_field(body: Any) -> str | None:
    """Return the field of a decoded body that has processors."""
    given = body if isinstance(body, dict) else {}
    return next((field for field in _PROCESSOR_FIELDS if given.get(field) is not None), None)
