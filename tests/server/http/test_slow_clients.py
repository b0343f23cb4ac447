"""Clients that stop sending, with real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http_server import running_server

HEAD = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    return answer


def test_connection_whose_body_does_not_arrive_is_closed(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine(request_body_timeout=0.2, port=0)
    with running_server(engine.config, engine) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(HEAD + b'{"text": ')
            answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert b"--request-body-timeout" in answer
    assert engine.queued_bytes.total == 0


def test_connection_whose_head_does_not_arrive_is_closed(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine(request_body_timeout=0.2, port=0)
    with running_server(engine.config, engine) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(HEAD[:50])
            answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"--request-body-timeout" in answer
