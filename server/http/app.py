"""The ASGI application: routes, middleware and the OpenAPI document."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from logitship.server.api_keys import ApiKeys
from logitship.server.config import ServerConfig
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.openai.openai_routes import openai_router
from logitship.server.http.sglang.sglang_routes import sglang_router
from logitship.server.http.utility.probe_routes import probe_router
from logitship.server.http.utility.tokenize_routes import tokenize_router
from logitship.server.rate_limits import RateLimit
from logitship.server.schemas.artifact_schemas import ArtifactList, ArtifactObject, DeletedArtifact
from logitship.server.schemas.documentation import complete
from logitship.server.schemas.openai_response_schemas import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    ModelCard,
    ModelList,
)
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest
from logitship.server.schemas.processor_schemas import (
    DeletedProcessor,
    ProcessorDetailsObject,
    ProcessorList,
    ProcessorObject,
)
from logitship.server.schemas.response_schemas import ErrorResponse, LoadResponse, VersionResponse
from logitship.server.schemas.responses_response_schemas import ResponseEvent
from logitship.server.schemas.responses_schemas import ResponsesRequest
from logitship.server.schemas.sglang_response_schemas import GenerateResponse, InternalState, ModelInfoResponse
from logitship.server.schemas.sglang_schemas import AbortRequest, GenerateRequest, SGLangSamplingParams
from logitship.server.schemas.tokenize_schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from logitship.server.uploads.artifact_routes import artifact_router
from logitship.server.uploads.processor_routes import processor_router

from .auth import OPEN_PATHS, ApiKeyMiddleware
from .cross_origin import AllowedHosts, CrossOriginProtectionMiddleware
from .docs_routes import docs_router
from .json_responses import install_error_handlers
from .metrics_routes import METRICS_PATH, metrics_router
from .pacing import TurnsMiddleware, UploadPace, UploadPaceMiddleware
from .playground_routes import playground_files, playground_router
from .pooling_routes import pooling_router
from .rate_limit_middleware import RateLimitMiddleware
from .request_log import HEADER as REQUEST_ID_HEADER
from .request_log import IGNORED_HEADER, PROCESSORS_HEADER, RequestLogMiddleware

_SCHEMAS: list[type] = [
    AbortRequest,
    ArtifactList,
    ArtifactObject,
    ChatCompletionResponse,
    ChatCompletionRequest,
    ChatCompletionStreamResponse,
    CompletionResponse,
    CompletionStreamResponse,
    CompletionRequest,
    ResponsesRequest,
    ResponseEvent,
    DeletedArtifact,
    DeletedProcessor,
    DetokenizeRequest,
    DetokenizeResponse,
    InternalState,
    ErrorResponse,
    GenerateResponse,
    GenerateRequest,
    LoadResponse,
    ModelCard,
    ModelInfoResponse,
    ModelList,
    ProcessorDetailsObject,
    ProcessorList,
    ProcessorObject,
    SGLangSamplingParams,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
]


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the schemas of request and response bodies."""
        if self.openapi_schema is None:
            complete(super().openapi(), _SCHEMAS)
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(engine: AsyncEngine) -> FastAPI:
    """Create the HTTP application of `engine`, which the caller starts and stops.

    If `engine.config` has API keys, every route requires one, except `/ping`, `/health`, `/health/ready`,
    `/health_generate` and the playground's files.
    """
    app = _App(
        title="logitship",
        summary="An LLM server that runs client-supplied logits processors.",
        version=version("logitship"),
        # FastAPI's own pages load scripts from a CDN.
        docs_url=None,
        redoc_url=None,
    )
    install_error_handlers(app)
    app.include_router(sglang_router(engine))
    app.include_router(openai_router(engine))
    app.include_router(processor_router(engine))
    app.include_router(artifact_router(engine))
    app.include_router(pooling_router(engine))
    app.include_router(tokenize_router(engine))
    app.include_router(probe_router(engine))
    app.include_router(metrics_router(engine.metrics, engine.pool))
    app.include_router(docs_router())
    files = {} if engine.config.disable_playground else playground_files()
    app.include_router(playground_router(files))
    keys = ApiKeys(engine.config.api_key, engine.config.shipping_api_key)
    app.add_middleware(UploadPaceMiddleware, pace=UploadPace(engine.others_run))
    app.add_middleware(TurnsMiddleware, others_run=engine.others_run)
    if engine.config.requests_per_minute:
        requests = RateLimit("requests", engine.config.requests_per_minute)
        app.add_middleware(RateLimitMiddleware, limit=requests, uncounted={METRICS_PATH})
    app.add_middleware(
        ApiKeyMiddleware, keys=keys, open_paths=OPEN_PATHS | files.keys(), other_keys=_metrics_keys(engine.config)
    )
    _add_browser_checks(app, engine.config)
    app.add_middleware(RequestLogMiddleware, metrics=engine.metrics)  # outermost: sees the responses of all others
    return app


def _metrics_keys(config: ServerConfig) -> dict[str, ApiKeys]:
    return {METRICS_PATH: ApiKeys(config.metrics_api_key, ())} if config.metrics_api_key else {}


def _add_browser_checks(app: FastAPI, config: ServerConfig) -> None:
    app.add_middleware(
        CrossOriginProtectionMiddleware,
        hosts=AllowedHosts(config.host, config.allowed_host),
        allowed_origins=config.allowed_origin,
    )
    if config.allowed_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.lower() for origin in config.allowed_origin],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, PROCESSORS_HEADER, REQUEST_ID_HEADER, "Retry-After"],
        )
