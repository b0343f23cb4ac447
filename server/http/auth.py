"""API keys: who may come in, who may ship code, and who is whose neighbour."""

from __future__ import annotations

import hmac
from collections.abc import Sequence, Set
from dataclasses import dataclass
from hashlib import sha256

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from logitship.server.refusals import Forbidden, Unauthorized

from .exception_handlers import refusal_response

OPEN_PATHS = frozenset({"/health", "/health_generate"})
"""What a load balancer may ask without a key."""

_TENANT_LENGTH = 16
"""Hexadecimal digits. Enough to tell an operator's keys apart; too few to be taken for a key."""


@dataclass(frozen=True)
class Caller:
    """Who sent an HTTP request.

    Attributes:
        tenant: stands for its API key, and says nothing about it; "" where the server asks for none.
        may_ship: it may send code, if the server takes code at all.
    """

    tenant: str
    may_ship: bool


class ApiKeys:
    """The operator's keys.

    Args:
        generating: keys that may generate.
        shipping: keys that may generate and ship code. If there are none, everybody may ship.
    """

    def __init__(self, generating: Sequence[str], shipping: Sequence[str]) -> None:
        everybody_ships = not shipping
        may_ship = dict.fromkeys(generating, everybody_ships) | dict.fromkeys(shipping, True)
        self._callers = [(_digest(_encoded(key)), Caller(_tenant(key), ships)) for key, ships in may_ship.items()]

    def caller(self, authorization: str) -> Caller | None:
        """Who sends this `Authorization` header; None: somebody without a key, though one is asked for."""
        if not self._callers:
            return Caller("", may_ship=True)
        scheme, _, key = authorization.partition(" ")
        # Starlette decodes header bytes as Latin-1: this gives them back. Only what HTTP pads with is stripped: to
        # Latin-1, the last byte of a key in UTF-8 may look like a space.
        presented = _digest(key.strip(" \t").encode("latin-1"))
        found = None
        # Digests, and all of them: the time tells neither the length of a key, nor which one is nearly right.
        for digest, caller in self._callers:
            if hmac.compare_digest(presented, digest):
                found = caller
        return found if scheme.lower() == "bearer" else None


class ApiKeyMiddleware:
    """Finds out who is calling, for `caller_of`. If there are keys, requests without one end here.

    Not those for the open paths, which have no caller.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = self._keys.caller(Headers(scope=scope).get("authorization", ""))
            if caller is None:
                refused = Unauthorized("the API key is missing or wrong: send it as 'Authorization: Bearer <key>'")
                await refusal_response(refused)(scope, receive, send)
                return
            scope["state"] = {**scope.get("state", {}), "caller": caller}
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Who sent a request."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def check_key_may_ship(caller: Caller, at: str | None = None) -> None:
    """Refuse code from those whose key is for generating alone.

    Args:
        at: path of the code in the request body; None: it is the body.

    Raises:
        Forbidden: says which flag makes a key that may.
    """
    if not caller.may_ship:
        raise Forbidden(
            "this API key may generate, but not ship processors: use one that the server's operator gave with "
            "--shipping-api-key, or name an installed processor, or a registered one by its digest",
            param=at,
        )


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # as a command line gives bytes that are no UTF-8


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _tenant(key: str) -> str:
    return sha256(b"logitship tenant\0" + _encoded(key)).hexdigest()[:_TENANT_LENGTH]
