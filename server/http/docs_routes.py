"""`/docs`: Swagger UI. Its files come with `fastapi-offline`, not from a CDN."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse

_FOLDER = Path(str(files("fastapi_offline"))) / "static"
_FILES = ("favicon.png", "swagger-ui-bundle.js", "swagger-ui.css")


def docs_router() -> APIRouter:
    """Create the routes of the page and its files."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> Response:
        return get_swagger_ui_html(
            # Relative: a proxy may serve this under another path.
            openapi_url="openapi.json",
            title="logitship",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )

    for name in _FILES:
        router.add_api_route(f"/docs/{name}", _sender(_FOLDER / name), methods=["GET"])
    return router


def _sender(file: Path) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(file)

    return send
