from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.answers import error_of

BODY = {"text": "a"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def limited(make_fake_engine: Any, make_client: Any) -> Any:
    """HTTP client of a server with two keys and three requests per minute."""
    return make_client(make_fake_engine(api_key=("k", "other"), requests_per_minute=3)).http


def test_a_key_over_its_limit(limited: Any) -> None:
    for path in ("/generate", "/v1/models", "/nothing"):  # whatever they ask for
        limited.get(path, headers=bearer("k"))
    refused = limited.post("/generate", json=BODY, headers=bearer("k"))
    error = error_of(refused, 429)
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert "--requests-per-minute" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert limited.post("/generate", json=BODY, headers=bearer("other")).status_code == 200


def test_what_is_not_counted(limited: Any) -> None:
    for _ in range(5):
        assert limited.get("/health").status_code == 200
        assert limited.get("/health/ready").status_code == 200
        assert limited.get("/").status_code == 200
        assert limited.get("/metrics", headers=bearer("k")).status_code == 200
        assert limited.get("/v1/models", headers=bearer("wrong")).status_code == 401
        assert limited.get("/v1/models", headers={**bearer("k"), "Origin": "https://evil.example"}).status_code == 403
    assert limited.post("/generate", json=BODY, headers=bearer("k")).status_code == 200


def test_clients_without_keys_share_a_limit(make_fake_engine: Any, make_client: Any) -> None:
    http = make_client(make_fake_engine(requests_per_minute=2)).http
    assert [http.post("/generate", json=BODY).status_code for _ in range(4)] == [200, 200, 429, 429]


def test_metric(limited: Any) -> None:
    for _ in range(5):
        limited.get("/v1/models", headers=bearer("k"))
    text = limited.get("/metrics", headers=bearer("k")).text
    assert 'logitship_rate_limited_requests_total{limit="requests"} 2.0' in text
    assert 'logitship_rate_limited_requests_total{limit="processor_loads"} 0.0' in text


def test_no_limit_by_default(client: Any) -> None:
    assert {client.http.get("/v1/models").status_code for _ in range(100)} == {200}
