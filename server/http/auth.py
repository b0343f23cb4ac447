"""Authentication of HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.api_keys import ApiKeys
from logitship.server.refusals import Unauthorized

from .json_responses import refusal_response

OPEN_PATHS = frozenset({"/health", "/health/ready", "/health_generate", "/ping"})
"""Paths that need no key, for load balancers."""


class ApiKeyMiddleware:
    """Authenticates requests and stores the caller for `caller_of`.

    If there are keys, requests without one get 401. Open paths are not authenticated: their requests have no caller.

    Args:
        app: the application.
        keys: the keys.
        open_paths: paths that need no key.
        other_keys: paths with keys of their own, instead of `keys`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: Set[str] = OPEN_PATHS,
        other_keys: Mapping[str, ApiKeys] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._other_keys = other_keys or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            keys = self._other_keys.get(scope["path"], self._keys)
            caller = keys.caller(Headers(scope=scope).get("authorization", ""))
            if caller is None:
                refused = Unauthorized("the API key is missing or wrong: send it as 'Authorization: Bearer <key>'")
                await refusal_response(refused)(scope, receive, send)
                return
            scope["state"] = {**scope.get("state", {}), "caller": caller}
        await self._app(scope, receive, send)
