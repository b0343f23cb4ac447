"""The sockets that a server listens on, and its URL."""

from __future__ import annotations

import errno
import socket

from .refusals import StartError


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind the sockets of a server, which refuse connections until it listens.

    Args:
        host: an address, or a name with several.
        port: 0: any free one.

    Raises:
        StartError: the address cannot be used; says why.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"--host {host}: the name cannot be resolved ({error.strerror})") from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            opened = socket.socket(family, kind, protocol)
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All addresses of a name get the same port.
            opened.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
    except OSError as error:
        for opened in sockets:
            opened.close()
        if error.errno == errno.EADDRINUSE:
            raise port_in_use(port) from error
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sockets


def port_in_use(port: int) -> StartError:
    """Return the error for a port on which another process listens."""
    return StartError(
        f"--port {port}: already in use: end the process that listens on it, or choose another port (0: any free one)"
    )


def base_url(host: str, port: int) -> str:
    """Return the URL of a server for clients on its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
