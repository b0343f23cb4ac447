from __future__ import annotations

import pytest

from logitship.server.allowed_hosts import check_allowed_host, check_allowed_origin, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "", "localhost.evil.example", "llm.example.org"])
def test_reachable_from_other_machines(host: str) -> None:
    assert not is_loopback(host)


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
