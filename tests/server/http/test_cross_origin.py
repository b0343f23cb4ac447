from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.websockets import WebSocketDisconnect

from logitship.server.http.cross_origin import AllowedHosts, is_same_origin
from tests.helpers.answers import error_of

BODY = {"text": "a"}
SITE = "https://app.example.org"
FOREIGN: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:8000"},  # same site, another port
    {"Origin": "http://127.0.0.1"},  # another name of this machine
    {"Origin": "null"},  # a sandboxed frame, or a file
    {"Origin": ""},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
]
OWN: list[dict[str, str]] = [
    {},
    {"Origin": "http://localhost"},
    {"Origin": "http://localhost:80"},
    {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"},
    {"Origin": SITE, "Sec-Fetch-Site": "same-origin"},  # a proxy replaced `Host`
    {"Sec-Fetch-Site": "none"},
]
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("path", ["/generate", "/v1/processors", "/flush_cache", "/nothing"])
def test_other_sites_are_refused(
    headers: dict[str, str], path: str, shipping_client: Any, shipping_engine: Any
) -> None:
    error = error_of(shipping_client.http.post(path, json=BODY, headers=headers), 403)
    assert error["type"] == "permission_error"
    assert "--allowed-origin" in error["message"]
    assert not shipping_engine.requests
    assert not shipping_engine.registered


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("path", ["/flush_cache", "/health_generate", "/v1/models", "/openapi.json"])
def test_other_sites_may_not_read_either(headers: dict[str, str], path: str, client: Any, engine: Any) -> None:
    error_of(client.http.get(path, headers=headers), 403)
    assert not engine.requests


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_programs_and_own_pages_are_accepted(headers: dict[str, str], client: Any) -> None:
    for path in ("/", "/docs", "/v1/models"):
        assert client.http.get(path, headers=headers).status_code == 200
    assert client.http.post("/generate", json=BODY, headers=headers).status_code == 200


def test_message_names_the_flag(client: Any) -> None:
    error = error_of(client.http.post("/generate", json=BODY, headers={"Origin": SITE}), 403)
    assert error["message"].endswith(f"unless it is started with --allowed-origin {SITE}")
    error = error_of(client.http.get("/", headers={"Host": "llm.example.org:30000"}), 403)
    assert error["message"].endswith("or start the server with --allowed-host llm.example.org")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_other_sites_may_link_to_the_pages(path: str, client: Any) -> None:
    assert client.http.get(path, headers=LINK).status_code == 200
    error_of(client.http.get(path, headers=LINK | {"Sec-Fetch-Dest": "iframe"}), 403)
    error_of(client.http.get(path, headers=LINK | {"Sec-Fetch-Mode": "no-cors"}), 403)
    error_of(client.http.post(path, headers=LINK), 403)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:30000", "", "127.0.0.1.evil.example"])
@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/nothing"])
def test_foreign_host(host: str, path: str, client: Any) -> None:
    # After DNS rebinding, the request is same-origin for the browser.
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    error = error_of(client.http.get(path, headers=headers), 403)
    assert error["type"] == "permission_error"
    assert "--allowed-host" in error["message"]


def test_refusals_need_no_key_and_are_logged(
    make_fake_engine: Any, make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = make_client(make_fake_engine(api_key="k")).http.get("/v1/models", headers={"Host": "evil.example"})
    error_of(answer, 403)
    assert answer.headers["x-request-id"]
    assert "GET /v1/models 403" in caplog.text


def test_allowed_host(make_fake_engine: Any, make_client: Any) -> None:
    http = make_client(make_fake_engine(allowed_host=("llm.example.org", "*.corp.example"))).http
    for host in ("llm.example.org", "a.corp.example:30000", "127.0.0.1:30000"):
        assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    error_of(http.get("/v1/models", headers={"Host": "evil.example"}), 403)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "application/jsonp",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/processors", "/flush_cache"])
def test_bodies_must_be_json(kind: str, path: str, shipping_client: Any, shipping_engine: Any) -> None:
    answer = shipping_client.http.post(path, content=b'{"text": "a"}', headers={"Content-Type": kind})
    error = error_of(answer, 415)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("Content-Type: ")
    assert "application/json" in error["message"]
    assert not shipping_engine.requests


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_json_bodies(kind: str, method: str, client: Any) -> None:
    answer = client.http.request(method, "/generate", content=b'{"text": "a"}', headers={"Content-Type": kind})
    assert answer.status_code == 200


def test_only_programs_may_omit_the_content_type(client: Any) -> None:
    assert client.http.post("/generate", content=b'{"text": "a"}').status_code == 200
    assert client.http.post("/flush_cache").status_code == 200
    for origin in ("http://localhost", "https://evil.example"):
        answer = client.http.post("/generate", content=b'{"text": "a"}', headers={"Origin": origin})
        assert answer.status_code in (403, 415)


# --- --allowed-origin ---


@pytest.fixture
def open_to(make_fake_engine: Any, make_client: Any) -> Callable[..., Any]:
    """Creates the HTTP client of a server that these origins may use."""
    return lambda *origins, **settings: make_client(make_fake_engine(allowed_origin=origins, **settings)).http


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-request-id",
}


def test_no_cors_without_the_flag(client: Any) -> None:
    for origin in (SITE, "http://localhost"):
        answer = client.http.options("/generate", headers={"Origin": origin, **PREFLIGHT})
        assert answer.status_code in (403, 405)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_allowed_origin(open_to: Callable[..., Any]) -> None:
    http = open_to(SITE, "http://localhost:8000", api_key="k")
    for origin in (SITE, "http://localhost:8000"):
        preflight = http.options("/generate", headers={"Origin": origin, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        # The page can read refusals too.
        for status, key in ((401, "wrong"), (200, "k")):
            answer = http.post("/generate", json=BODY, headers={**headers, "Authorization": f"Bearer {key}"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
            assert "X-Request-ID" in answer.headers["access-control-expose-headers"]


def test_other_origins_remain_refused(open_to: Callable[..., Any]) -> None:
    http = open_to(SITE)
    for headers in ({"Origin": f"{SITE}.evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = http.post("/generate", json=BODY, headers=headers)
        error_of(answer, 403)
        assert "access-control-allow-origin" not in answer.headers
    assert http.options("/generate", headers={"Origin": "https://evil.example", **PREFLIGHT}).status_code == 400
    error_of(http.post("/generate", content=b"{}", headers={"Origin": SITE, "Content-Type": "text/plain"}), 415)
    error_of(http.post("/generate", json=BODY, headers={"Origin": SITE, "Host": "evil.example"}), 403)


def test_any_origin(open_to: Callable[..., Any]) -> None:
    http = open_to("*")
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert http.post("/generate", json=BODY, headers=headers).status_code == 200
    assert http.options("/generate", headers={"Origin": SITE, **PREFLIGHT}).status_code == 200


# --- WebSockets ---


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {}], ids=str)
def test_web_sockets_are_refused(headers: dict[str, str], client: Any) -> None:
    with pytest.raises(WebSocketDisconnect), client.http.websocket_connect("/generate", headers=headers):
        pass


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
