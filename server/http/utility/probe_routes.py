"""Routes for load balancers and tools that ask what runs here: `/ping`, `/version`, `/load`."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Response

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.schemas.documentation import operation
from logitship.server.schemas.response_schemas import LoadResponse, VersionResponse
from logitship.server.uploads.refusal_responses import JSONResponse


def probe_router(engine: AsyncEngine) -> APIRouter:
    """Create the routes for `engine`."""
    router = APIRouter(tags=["Probes"])

    @router.get("/ping", openapi_extra=operation())
    @router.post("/ping", openapi_extra=operation())
    async def ping() -> Response:
        """Return 200 while the engine is alive and accepts requests, else 503, as `/health`. For SageMaker."""
        return Response(status_code=200 if engine.healthy and engine.accepting else 503)

    @router.get("/version", openapi_extra=operation(response=VersionResponse))
    async def show_version() -> Response:
        """Show logitship's version."""
        body: VersionResponse = {"version": version("logitship")}
        return JSONResponse(body)

    @router.get("/load", openapi_extra=operation(response=LoadResponse))
    async def load() -> Response:
        """Show how many sequences run and wait."""
        stats = engine.stats()
        body: LoadResponse = {"server_load": stats.running + stats.waiting}
        return JSONResponse(body)

    return router
