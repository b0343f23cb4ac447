"""API keys: authentication, the right to ship code, and tenants."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.refusals import Forbidden, Unauthorized

from .json_responses import refusal_response

OPEN_PATHS = frozenset({"/health", "/health/ready", "/health_generate", "/ping"})
"""Paths that need no key, for load balancers."""

_TENANT_LENGTH = 16
"""Hexadecimal digits. Enough to tell an operator's keys apart, too few to be used as a key."""


@dataclass(frozen=True)
class Caller:
    """The client that sent an HTTP request.

    Attributes:
        tenant: hash that identifies the API key without revealing it; "" if the server requires none.
        may_ship: may ship code, if the server accepts code at all.
    """

    tenant: str
    may_ship: bool


class ApiKeys:
    """The operator's keys.

    Args:
        generating: keys that may generate.
        shipping: keys that may generate and ship code. If empty, every key may ship.
    """

    def __init__(self, generating: Sequence[str], shipping: Sequence[str]) -> None:
        all_may_ship = not shipping
        may_ship = dict.fromkeys(generating, all_may_ship) | dict.fromkeys(shipping, True)
        self._callers = [(_digest(_encoded(key)), Caller(_tenant(key), ships)) for key, ships in may_ship.items()]

    def caller(self, authorization: str) -> Caller | None:
        """Authenticate an `Authorization` header. None: a key is required, and it is missing or wrong."""
        if not self._callers:
            return Caller("", may_ship=True)
        scheme, _, key = authorization.partition(" ")
        # Starlette decodes header bytes as Latin-1; encoding restores them. Only HTTP's own padding is stripped: in
        # Latin-1, the last byte of a key in UTF-8 may look like a space.
        presented = _digest(key.strip(" \t").encode("latin-1"))
        found = None
        # Compare digests, and all of them: the timing must not reveal a key's length or a near match.
        for digest, caller in self._callers:
            if hmac.compare_digest(presented, digest):
                found = caller
        return found if scheme.lower() == "bearer" else None


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


def caller_of(request: Request) -> Caller:
    """Return the caller of an authenticated request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def check_key_may_ship(caller: Caller, at: str | None = None) -> None:
    """Refuse code from a caller whose key may only generate.

    Args:
        caller: the caller.
        at: path of the code in the request body; None: the whole body.

    Raises:
        Forbidden: names the flag for keys that may ship.
    """
    if not caller.may_ship:
        raise Forbidden(
            "this API key may generate, but not ship processors: use a key that the server's operator set with "
            "--shipping-api-key, or name an installed processor, or a registered one by its digest",
            param=at,
        )


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # command line arguments that are not UTF-8


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _tenant(key: str) -> str:
    return sha256(b"logitship tenant\0" + _encoded(key)).hexdigest()[:_TENANT_LENGTH]
