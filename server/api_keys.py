"""API keys: who a client is, and whether it may ship code. Each key is a tenant."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

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
        self._callers = [(_digest(_encoded(key)), Caller(tenant_of(key), ships)) for key, ships in may_ship.items()]

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


def tenant_of(name: str) -> str:
    """Return the tenant that an API key, or another name of a client, stands for."""
    return sha256(b"logitship tenant\0" + _encoded(name)).hexdigest()[:_TENANT_LENGTH]


def _encoded(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # command line arguments that are not UTF-8


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
