"""Applies `--requests-per-minute` to HTTP requests."""

from __future__ import annotations

from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.rate_limits import RateLimit
from logitship.server.refusals import RateLimited

from .json_responses import refusal_response


class RateLimitMiddleware:
    """Refuses requests of callers that have reached their limit. Requests without a caller are not counted.

    Args:
        app: the application.
        limit: the limit.
        uncounted: paths that are not counted.
    """

    def __init__(self, app: ASGIApp, limit: RateLimit, uncounted: Set[str] = frozenset()) -> None:
        self._app = app
        self._limit = limit
        self._uncounted = uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or respond with 429."""
        caller = scope.get("state", {}).get("caller")
        if caller is not None and scope["path"] not in self._uncounted:
            try:
                self._limit.check(caller.tenant)
            except RateLimited as refused:
                await refusal_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)
