from __future__ import annotations

import socket

import pytest

from logitship.server.allowed_hosts import (
    AllowedHosts,
    check_allowed_host,
    check_allowed_origin,
    is_loopback,
    is_same_origin,
)

LOCAL = ["localhost", "LocalHost:30000", "127.0.0.1:30000", "[::1]:30000", "192.168.1.5", "[fe80::1]:80", "0.0.0.0:1"]
NEVER = [
    "evil.example",
    "127.0.0.1.evil.example:30000",
    "localhost.evil.example",
    "",
    ":30000",
    "a b",
    "evil@127.0.0.1",
]
PRIVATE = ["gpu-box:30000", "logitship.default.svc.cluster.local", "llm.internal:80", "box.home.arpa"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "", "localhost.evil.example", "llm.example.org"])
def test_reachable_from_other_machines(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "llm.example.org"])
def test_addresses_and_own_names_are_accepted(bound: str) -> None:
    hosts = AllowedHosts(bound)
    machine = socket.gethostname()
    for header in (*LOCAL, "localhost.", "app.localhost:1", bound, f"{bound}:80", machine, f"{machine}.local:30000"):
        assert hosts.accept(header), header
    for header in NEVER:
        assert not hosts.accept(header), header


def test_private_names_are_accepted_where_other_machines_may_ask() -> None:
    assert [AllowedHosts("0.0.0.0").accept(name) for name in PRIVATE] == [True] * len(PRIVATE)
    machine = socket.gethostname().lower()
    others = [name for name in PRIVATE if not name.startswith(machine)]
    assert [AllowedHosts("127.0.0.1").accept(name) for name in others] == [False] * len(others)


def test_allowed_hosts() -> None:
    hosts = AllowedHosts("127.0.0.1", ["LLM.example.org", "*.corp.example"])
    for header in ("llm.example.org", "llm.Example.org:443", "a.corp.example", "a.b.corp.example:1", "localhost"):
        assert hosts.accept(header), header
    for header in ("example.org", "corp.example", "notcorp.example", "evil.example"):
        assert not hosts.accept(header), header
    assert all(AllowedHosts("127.0.0.1", ["*"]).accept(header) for header in (*NEVER, *LOCAL))


@pytest.mark.parametrize("pattern", ["name", "a.example.org", "*.example.org", "*"])
def test_forms_of_allowed_hosts(pattern: str) -> None:
    check_allowed_host(pattern)


@pytest.mark.parametrize("pattern", ["", "a:80", "http://a", "a.*", "*a", "**", "a/b", "a b", "a,b", "[::1]"])
def test_malformed_allowed_host(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^allowed_host: expected a name without a port"):
        check_allowed_host(pattern)


@pytest.mark.parametrize("origin", ["https://a.example.org", "http://localhost:8000", "chrome-extension://abc", "*"])
def test_forms_of_allowed_origins(origin: str) -> None:
    check_allowed_origin(origin)


@pytest.mark.parametrize(
    "origin", ["", "null", "a.example.org", "https://a/", "https://a/b", "https://*.a", "https://"]
)
def test_malformed_allowed_origin(origin: str) -> None:
    with pytest.raises(ValueError, match=r"^allowed_origin: expected SCHEME://HOST"):
        check_allowed_origin(origin)


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1:30000", True),
        ("https://llm.example.org", "LLM.example.org", True),
        ("https://llm.example.org", "llm.example.org:443", True),
        ("http://llm.example.org:80", "llm.example.org", True),
        ("http://127.0.0.1:8000", "127.0.0.1:30000", False),
        ("http://localhost:30000", "127.0.0.1:30000", False),
        ("http://127.0.0.1:80", "127.0.0.1:8080", False),
        ("null", "null", False),
        ("", "", False),
    ],
)
def test_same_origin(origin: str, host: str, same: bool) -> None:
    assert is_same_origin(origin, host) is same
