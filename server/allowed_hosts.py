"""Values of `--host`, `--allowed-host` and `--allowed-origin`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"

_PATTERN = re.compile(r"(\*\.)?[^\s:/?#@*,]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,]+")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    address = address_of(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def check_allowed_host(pattern: str) -> None:
    """Check a value of `--allowed-host`.

    Raises:
        ValueError: it is neither a name, `*.` and a name, nor `*`.
    """
    if pattern != ANY and not _PATTERN.fullmatch(pattern):
        raise ValueError(f"allowed_host: expected a name without a port, *.NAME or *, got {pattern!r}")


def check_allowed_origin(origin: str) -> None:
    """Check a value of `--allowed-origin`.

    Raises:
        ValueError: it is neither an origin nor `*`.
    """
    if origin != ANY and not _ORIGIN.fullmatch(origin.lower()):
        raise ValueError(f"allowed_origin: expected SCHEME://HOST or SCHEME://HOST:PORT or *, got {origin!r}")


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """Return an IP address, which may be in brackets; None for a name."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
