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

import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.allowed_hosts import ANY, address_of, is_loopback
from logitship.server.refusals import Forbidden, RequestRefused
from logitship.server.uploads.content_type import check_content_type

from .json_responses import refusal_response

_PAGES = frozenset({"/", "/docs"})
"""Pages that other sites may link to."""
_METHODS_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
_MAX_SHOWN = 80
"""Characters of a header that a message repeats."""
_HOST_HEADER = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]\s:/?#@]+)(:\d*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa")
"""Names below these are never in the public DNS (RFC 6762, ICANN 2024, RFC 8375)."""


class AllowedHosts:
    """The values of `Host` that a server accepts.

    A web page can have its own name resolved to the address of a server (DNS rebinding); requests from the page are
    then same-origin for the browser, but their `Host` is the page's name. IP addresses cannot be rebound, and neither
    can names that the attacker cannot own: `localhost`, this machine's, and, where other machines may ask, names that
    exist in private networks only.

    Args:
        host: address or name to listen on.
        allowed: values of `--allowed-host`.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        patterns = [pattern.lower() for pattern in allowed]
        self._any = ANY in patterns
        self._names = {"localhost", host.lower(), machine, f"{machine}.local", *patterns}
        self._suffixes = (".localhost", *(pattern[1:] for pattern in patterns if pattern.startswith("*.")))
        self._takes_private_names = not is_loopback(host)

    def accept(self, host_header: str) -> bool:
        """Return whether a request with this `Host` is meant for this server."""
        name = _host_name(host_header)
        return self._any or (name is not None and self._knows(name))

    def _knows(self, name: str) -> bool:
        if name in self._names or name.endswith(self._suffixes) or address_of(name) is not None:
            return True
        return self._takes_private_names and ("." not in name or name.endswith(_PRIVATE_SUFFIXES))


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
            check_content_type(scope["path"], headers)

    def _is_cross_origin(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if ANY in self._allowed_origins or (origin or "").lower() in self._allowed_origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:
            # No page can set this header. "none": the address bar or a bookmark.
            return site not in ("same-origin", "none")
        return origin is not None and not is_same_origin(origin, headers.get("host", ""))


def _host_name(host_header: str) -> str | None:
    """Return the name or address in a `Host` header, in lower case; None if it is malformed."""
    found = _HOST_HEADER.fullmatch(host_header)
    return None if found is None else found[1].lower().removesuffix(".")


def is_same_origin(origin: str, host_header: str) -> bool:
    """Return whether `Origin` and `Host` name the same server. The scheme may differ: a proxy may add TLS."""
    scheme, _, netloc = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return bool(netloc) and netloc.removesuffix(port) == host_header.lower().removesuffix(port)


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a visitor follows a link to one of the pages. A page in a frame is not opened."""
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and scope["path"] in _PAGES
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _foreign_host(header: str) -> Forbidden:
    name = (_host_name(header) or "NAME")[:_MAX_SHOWN]
    return Forbidden(
        f"Host: {header[:_MAX_SHOWN]!r} is not a name of this server: use its IP address, or start the server with "
        f"--allowed-host {name}"
    )


def _foreign_origin(origin: str | None) -> Forbidden:
    if origin is None or origin == "null":
        return Forbidden(
            "Sec-Fetch-Site, Origin: web pages of other sites may not use this server, unless it is started with "
            "--allowed-origin and their origin, such as --allowed-origin https://app.example.org"
        )
    origin = origin[:_MAX_SHOWN]
    return Forbidden(
        f"Origin: web pages of {origin!r} may not use this server, unless it is started with --allowed-origin {origin}"
    )
