"""A processor cannot connect to or listen on any socket."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest


def tcp_connection(w: SimpleNamespace) -> None:
    import socket

    socket.create_connection(("127.0.0.1", w.tcp_port), timeout=2).sendall(b"hello")


def http_request(w: SimpleNamespace) -> None:
    import http.client

    http.client.HTTPConnection("127.0.0.1", w.tcp_port, timeout=0.2).request("GET", "/")


def udp_datagram(w: SimpleNamespace) -> None:
    import socket

    socket.socket(type=socket.SOCK_DGRAM).sendto(b"hello", ("127.0.0.1", w.udp_port))


def unix_connection(w: SimpleNamespace) -> None:
    import socket

    socket.socket(socket.AF_UNIX).connect(f"{w.folder}/socket")


def abstract_connection(w: SimpleNamespace) -> None:
    import attacker

    attacker.abstract(w.abstract)


def tcp_listener(w: SimpleNamespace) -> None:
    import socket
    import sys

    sys.listener = socket.create_server(("127.0.0.1", w.free_port))


def unix_listener(w: SimpleNamespace) -> None:
    import socket

    socket.socket(socket.AF_UNIX).bind(f"{w.folder}/another")


ATTACKS: list[Any] = [
    # attempt, refusal, change seen in the control
    (tcp_connection, "EPERM", "TCP connection"),
    (http_request, "EPERM", "TCP connection"),
    (udp_datagram, "EPERM", "UDP datagram"),
    (unix_connection, "EPERM", "Unix connection"),
    (abstract_connection, "EPERM", "abstract connection"),
    (tcp_listener, "EPERM", "TCP listener"),
    (unix_listener, "EPERM", "changed: another"),
]


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=lambda each: getattr(each, "__name__", ""))
def test_network_is_unreachable(attempt: Any, refusal: str, change: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(attempt)
    assert re.fullmatch(refusal, report.answer)
    assert target.changes(report) == []


@pytest.mark.parametrize(("attempt", "refusal", "change"), ATTACKS, ids=lambda each: getattr(each, "__name__", ""))
def test_control_network_is_reachable(attempt: Any, refusal: str, change: str, target: Any, unsandboxed: Any) -> None:
    assert change in target.changes_until(change, unsandboxed(attempt))
