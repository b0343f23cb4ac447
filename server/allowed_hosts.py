"""Host names and origins: `--allowed-host`, `--allowed-origin`, and what `--host` makes reachable."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

ANY = "*"

_HOST_HEADER = re.compile(r"(\[[^\[\]\s]+\]|[^\[\]\s:/?#@]+)(:\d*)?")
_PATTERN = re.compile(r"(\*\.)?[^\s:/?#@*,]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,]+")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa")
"""Names below these are never in the public DNS (RFC 6762, ICANN 2024, RFC 8375)."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    address = _address(host)
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


def is_same_origin(origin: str, host_header: str) -> bool:
    """Return whether `Origin` and `Host` name the same server. The scheme may differ: a proxy may add TLS."""
    scheme, _, netloc = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return bool(netloc) and netloc.removesuffix(port) == host_header.lower().removesuffix(port)


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
        name = host_name(host_header)
        return self._any or (name is not None and self._knows(name))

    def _knows(self, name: str) -> bool:
        if name in self._names or name.endswith(self._suffixes) or _address(name) is not None:
            return True
        return self._takes_private_names and ("." not in name or name.endswith(_PRIVATE_SUFFIXES))


def host_name(host_header: str) -> str | None:
    """Return the name or address in a `Host` header, in lower case; None if it is malformed."""
    found = _HOST_HEADER.fullmatch(host_header)
    return None if found is None else found[1].lower().removesuffix(".")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
