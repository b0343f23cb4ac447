from __future__ import annotations

from typing import Any

import pytest

from logitship.client.serialization.artifact import digest_of
from logitship.server.refusals import SHIPPING_IS_OFF

URL = "/v1/artifacts"
DATA = bytes(range(256))
DIGEST = digest_of(DATA)
BINARY = {"content-type": "application/octet-stream"}


def upload(client: Any, data: bytes = DATA, **headers: str) -> Any:
    return client.http.post(URL, content=data, headers={**BINARY, **headers})


def error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_upload_show_list_and_delete(shipping_client: Any) -> None:
    uploaded = upload(shipping_client)
    assert uploaded.status_code == 200
    artifact = uploaded.json()
    created = artifact.pop("created")
    assert artifact == {"object": "artifact", "digest": DIGEST, "size": 256}
    assert upload(shipping_client).json() == {**artifact, "created": created}
    assert shipping_client.http.get(f"{URL}/{DIGEST}").json() == {**artifact, "created": created}
    assert shipping_client.http.get(URL).json() == {"object": "list", "data": [{**artifact, "created": created}]}
    deleted = shipping_client.http.delete(f"{URL}/{DIGEST}").json()
    assert deleted == {"digest": DIGEST, "object": "artifact", "deleted": True}
    for answer in (shipping_client.http.get(f"{URL}/{DIGEST}"), shipping_client.http.delete(f"{URL}/{DIGEST}")):
        status, message = error(answer)
        assert status == 404
        assert message.startswith(f"the artifact {DIGEST} is missing: upload its bytes with POST /v1/artifacts")


def test_upload_is_refused_where_code_is(client: Any) -> None:
    assert error(upload(client)) == (400, SHIPPING_IS_OFF)


def test_bounds(shipping_client: Any, shipping_engine: Any) -> None:
    assert error(upload(shipping_client, b"")) == (400, "the request body is empty: send the artifact's bytes")
    limit = shipping_engine.config.max_artifact_size
    answer = upload(shipping_client, **{"content-length": str(limit + 1)})
    assert error(answer) == (413, f"the request body has more than {limit} bytes (--max-artifact-size)")
    status, message = error(upload(shipping_client, bytes(1 << 17)))  # more than the store has
    assert (status, "--artifact-cache-bytes" in message) == (413, True)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", "application/json"])
def test_only_bytes_that_pages_of_other_sites_cannot_send(kind: str, shipping_client: Any) -> None:
    status, message = error(upload(shipping_client, **{"content-type": kind}))
    assert status == 415
    assert message.endswith(
        "send the body as application/octet-stream (curl: -H 'Content-Type: application/octet-stream')"
    )


def test_bytes_are_taken_nowhere_else(shipping_client: Any) -> None:
    answer = shipping_client.http.post("/v1/processors", content=DATA, headers=BINARY)
    status, message = error(answer)
    assert (status, "send the body as application/json" in message) == (415, True)


def test_pages_of_other_sites_are_refused(shipping_client: Any) -> None:
    answer = upload(shipping_client, origin="https://evil.example", **{"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403
