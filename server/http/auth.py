"""The API key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.errors import Unauthorized

from .errors import refusal_response

OPEN_PATHS = frozenset({"/health", "/health_generate"})
"""What a load balancer may ask without a key."""


class ApiKeyMiddleware:
    """Asks every request, except those for `OPEN_PATHS`, for `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows_key(Headers(scope=scope)):
            refused = Unauthorized("the API key is missing or wrong: send it as 'Authorization: Bearer <key>'")
            await refusal_response(refused)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Starlette decodes header bytes as Latin-1: this gives them back. The comparison takes as long for every key.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._expected)
