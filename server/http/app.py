"""The ASGI application: one function that wires it together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from logitship.server.engine.async_engine import AsyncEngine

from .auth import ApiKeyMiddleware, ApiKeys
from .documentation import add_schemas
from .errors import install_error_handlers
from .openai_routes import openai_router
from .openai_schemas import ChatCompletionRequest, CompletionRequest
from .pooling_routes import pooling_router
from .processor_routes import processor_router
from .schema import RequestModel
from .sglang_routes import sglang_router
from .sglang_schemas import AbortRequest, GenerateRequest, SGLangSamplingParams

_BODIES: list[type[RequestModel]] = [
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    SGLangSamplingParams,
]


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the request bodies."""
        document = super().openapi()
        add_schemas(document, _BODIES)
        return document


def create_app(engine: AsyncEngine) -> FastAPI:
    """The HTTP front of `engine`, which the caller starts and stops.

    Everything but `/health` and `/health_generate` asks for an API key if `engine.config` has any.
    """
    app = _App(
        title="logitship",
        summary="An LLM server that runs the logits processor that comes with a request.",
        version=version("logitship"),
    )
    install_error_handlers(app)
    app.include_router(sglang_router(engine))
    app.include_router(openai_router(engine))
    app.include_router(processor_router(engine))
    app.include_router(pooling_router(engine))
    app.add_middleware(ApiKeyMiddleware, keys=ApiKeys(engine.config.api_key, engine.config.shipping_api_key))
    return app
