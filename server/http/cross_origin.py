"""Cross-origin protection: web pages of other sites cannot use the server through a visitor's browser.

A browser sends requests of any page to any address, also to a server on the visitor's own machine. Three checks keep
such requests out, and programs pass them without noticing:

1. `Host` is a name or an address of this server, which it is not after DNS rebinding.
2. The browser does not say that the request is another site's, by `Sec-Fetch-Site` or `Origin`. The rules are those of
   `CrossOriginProtection` in Go's net/http, for all methods: <https://pkg.go.dev/net/http#CrossOriginProtection>.
3. The body is JSON, or bytes where a route takes them, which a page of another site cannot send without asking first
   (a CORS preflight).
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.allowed_hosts import ANY, AllowedHosts, host_name, is_same_origin
from logitship.server.refusals import Forbidden, RequestRefused, UnsupportedMediaType

from .json_responses import refusal_response

_PAGES = frozenset({"/", "/docs"})
"""Pages that other sites may link to."""
_BINARY_PATH = "/v1/artifacts"
"""Path whose bodies are bytes. Not a form: pages may send one to other sites."""
_METHODS_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_JSON = "application/json"
_LONGEST_SHOWN = 80
"""Characters of a header that a message repeats."""


class CrossOriginProtectionMiddleware:
    """Refuses requests that a web page of another site, or under another host name, makes a browser send.

    Args:
        app: the application.
        hosts: accepted values of `Host`.
        allowed_origins: values of `--allowed-origin`.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, allowed_origins: Iterable[str] = ()) -> None:
        self._app = app
        self._hosts = hosts
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with 403 or 415."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope, Headers(scope=scope))
        except RequestRefused as refused:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})  # before it is accepted: the client gets 403
            else:
                await refusal_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host")
        if host is not None and not self._hosts.accept(host):  # HTTP/1.0 programs send none; browsers always do
            raise _foreign_host(host)
        if self._is_cross_origin(headers) and not _opens_page(scope, headers):
            raise _foreign_origin(headers.get("origin"))
        if scope["type"] == "http" and scope["method"] in _METHODS_WITH_BODY:
            _check_content_type(headers, "application/octet-stream" if scope["path"] == _BINARY_PATH else _JSON)

    def _is_cross_origin(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if ANY in self._allowed_origins or (origin or "").lower() in self._allowed_origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:
            # No page can set this header. "none": the address bar or a bookmark.
            return site not in ("same-origin", "none")
        return origin is not None and not is_same_origin(origin, headers.get("host", ""))


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a visitor follows a link to one of the pages. A page in a frame is not opened."""
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and scope["path"] in _PAGES
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _check_content_type(headers: Headers, expected: str) -> None:
    """Refuse bodies that are not declared as what is expected. Programs may omit the header."""
    given = headers.get("content-type")
    if given is None and "origin" not in headers:
        return
    if given is None or given.partition(";")[0].strip().lower() != expected:
        shown = "is missing" if given is None else f"{given[:_LONGEST_SHOWN]!r} is not supported"
        raise UnsupportedMediaType(
            f"Content-Type: {shown}: send the body as {expected} (curl: -H 'Content-Type: {expected}')"
        )


def _foreign_host(header: str) -> Forbidden:
    name = (host_name(header) or "NAME")[:_LONGEST_SHOWN]
    return Forbidden(
        f"Host: {header[:_LONGEST_SHOWN]!r} is not a name of this server: use its IP address, or start the server with "
        f"--allowed-host {name}"
    )


def _foreign_origin(origin: str | None) -> Forbidden:
    if origin is None or origin == "null":
        return Forbidden(
            "Sec-Fetch-Site, Origin: web pages of other sites may not use this server, unless it is started with "
            "--allowed-origin and their origin, such as --allowed-origin https://app.example.org"
        )
    origin = origin[:_LONGEST_SHOWN]
    return Forbidden(
        f"Origin: web pages of {origin!r} may not use this server, unless it is started with --allowed-origin {origin}"
    )
