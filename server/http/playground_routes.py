"""The playground: a page at `/`, and the files that it loads.

The page is a client like any other: it holds nothing secret and calls the public routes. So its files need no API key,
and the requests that it makes do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

from .documentation import operation

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
"""What is served, by the end of a file's name; nothing else in the folder is."""

_HEADERS = {
    # A text that a model or a processor wrote must never become a script, and the page may talk to nobody else.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser keeps the files, and asks each time whether they are still the same: an update is seen at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PlaygroundFile:
    """One file, read once.

    Attributes:
        content: its bytes.
        content_type: value of its header.
        etag: says which bytes they are, with its quotation marks.
    """

    content: bytes
    content_type: str
    etag: str


def playground_files(folder: Path = FOLDER) -> dict[str, PlaygroundFile]:
    """Path of a URL → the file that is there.

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
    """The routes of `files`. The page alone is in the OpenAPI document."""
    router = APIRouter(tags=["Playground"])
    for path, file in files.items():
        router.add_api_route(
            path,
            _route(file),
            methods=["GET"],
            include_in_schema=path == "/",
            openapi_extra=operation(text="<!doctype html>…", media_type="text/html"),
        )
    return router


def _route(file: PlaygroundFile) -> Callable[[Request], Awaitable[Response]]:
    async def playground(request: Request) -> Response:
        """The playground, for browsers."""
        return _answer(request, file)

    return playground


def _answer(request: Request, file: PlaygroundFile) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {file.etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "Content-Type": file.content_type})
