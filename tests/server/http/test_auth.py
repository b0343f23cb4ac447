from __future__ import annotations

from typing import Any

import pytest

KEY = "kéy"


@pytest.fixture
def locked(make_fake_engine: Any, speak: Any) -> Any:
    return speak(make_fake_engine(api_key=KEY))


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/models", "/server_info", "/openapi.json", "/nothing", "/health/"]
)
@pytest.mark.parametrize("header", [None, "", KEY, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_wrong_key(path: str, header: str | None, locked: Any) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = locked.http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_right_key(scheme: str, locked: Any) -> None:
    headers = {"Authorization": f"{scheme} {KEY}".encode()}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    answer = locked.http.post("/generate", json={"text": "a"}, headers=headers)
    assert answer.json()["text"] == "Hi!"


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_needs_no_key(path: str, locked: Any) -> None:
    assert locked.http.get(path).status_code == 200


def test_without_a_key_everything_is_open(client: Any) -> None:
    assert client.http.get("/v1/models").status_code == 200
