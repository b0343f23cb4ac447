"""Tenants: clients whose processors, state and limits are separate."""

from __future__ import annotations

from hashlib import sha256

_LENGTH = 16
"""Hexadecimal digits. Enough to tell an operator's keys apart, too few to be used as a key."""


def tenant_of(key: bytes) -> str:
    """Return a hash that identifies an API key without revealing it."""
    return sha256(b"logitship tenant\0" + key).hexdigest()[:_LENGTH]
