"""The playground: a page at `/`, and the files that it loads.

The page is an ordinary client of the public routes and contains no secrets. Its files need no API key; its requests do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from logitship.server.schemas.documentation import operation

FOLDER = Path(__file__).parent.parent / "playground"

_CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".py": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
"""Content types by file suffix. Other files in the folder are not served."""

_HEADERS = {
    # Text from a model or a processor must never run as a script, and the page may only connect to this server.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Browsers cache the files but revalidate them each time: an update shows at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PlaygroundFile:
    """A file, held in memory.

    Attributes:
        content: the bytes.
        content_type: value of the `Content-Type` header.
        etag: hash of the bytes, in quotation marks.
    """

    content: bytes
    content_type: str
    etag: str


@cache
def playground_files(folder: Path = FOLDER) -> dict[str, PlaygroundFile]:
    """Load the files: URL path → file. Each folder is read once.

    Only these paths exist. No part of a URL is ever looked up on the disk.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        kind = _CONTENT_TYPES.get(path.suffix)
        if kind is None or not path.is_file():
            continue
        content = path.read_bytes()
        file = PlaygroundFile(content, kind, f'"{sha256(content).hexdigest()[:32]}"')
        name = path.relative_to(folder).as_posix()
        files["/" if name == "index.html" else f"/playground/{name}"] = file
    return files


def playground_router(files: dict[str, PlaygroundFile]) -> APIRouter:
    """Create the routes of `files`. Only the page itself is in the OpenAPI document."""
    router = APIRouter(tags=["Playground"])
    for path, file in files.items():
        if path == "/":
            documentation = operation(text="<!doctype html>…", media_type="text/html")
            router.add_api_route(path, _route(file), methods=["GET"], openapi_extra=documentation)
        else:
            # Not FastAPI's routes: to analyze the parameters of fifty functions takes a third of the app's creation.
            router.routes.append(Route(path, _route(file)))
    return router


def _route(file: PlaygroundFile) -> Callable[[Request], Awaitable[Response]]:
    async def playground(request: Request) -> Response:
        """The playground, a page for browsers."""
        return _respond(request, file)

    return playground


def _respond(request: Request, file: PlaygroundFile) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.content_type})
