from __future__ import annotations

from typing import Any

import orjson
import pytest

from logitship.client.processor_string import InstalledProcessor, PickledProcessor, SourceProcessor
from logitship.server.errors import SHIPPING_IS_OFF, ServiceUnavailable

URL = "/v1/processors"
PICKLED = {"callable": "80"}
SOURCE = {"source": "class A: ...", "class_name": "A"}


def test_what_is_installed(client: Any) -> None:
    assert client.http.get(URL).json() == {
        "object": "list",
        "data": [
            {"name": "ban", "description": "Bans tokens.", "params_schema": {"type": "object"}, "is_mask": True},
            {"name": "own", "description": "", "params_schema": None, "is_mask": False},
        ],
    }


def test_register(shipping_client: Any, shipping_engine: Any) -> None:
    expected = [PickledProcessor(b"\x80"), SourceProcessor("class A: ...", "A"), InstalledProcessor("min_p")]
    for form in (PICKLED, SOURCE, {"name": "min_p"}):
        assert shipping_client.ok(URL, form) == {"digest": "sha256:" + "2" * 64, "name": "Mine"}
    assert shipping_engine.registered == [(string, "") for string in expected]


@pytest.mark.parametrize("form", [PICKLED, SOURCE])
def test_code_needs_the_flag(form: dict[str, str], client: Any, engine: Any) -> None:
    answer = client.post(URL, form)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == SHIPPING_IS_OFF
    assert not engine.registered
    client.ok(URL, {"name": "min_p"})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the processor string is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b"{}", "none of the keys"),
        (b'{"callable": "xy"}', "hexadecimal"),
        (b'{"source": "x"}', "'class_name' is missing"),
        (b'{"source": "x", "class_name": "X", "extra": 1}', "unknown keys"),
        (orjson.dumps({"digest": "sha256:" + "a" * 64}), "upload the processor itself"),
        (orjson.dumps({"callable": b"no pickle".hex()}), "cannot be unpickled"),
    ],
)
def test_refused(body: bytes, says: str, shipping_client: Any, shipping_engine: Any) -> None:
    answer = shipping_client.http.post(URL, content=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not shipping_engine.registered


def test_size_limit(shipping_client: Any) -> None:
    form = {"source": "#" * (1 << 12), "class_name": "A"}
    answer = shipping_client.post(URL, form)
    assert answer.status_code == 413
    assert "more than 4096 bytes" in answer.json()["error"]["message"]


def test_busy(shipping_client: Any, shipping_engine: Any) -> None:
    async def full(string: Any, tenant: str) -> tuple[str, str]:
        raise ServiceUnavailable("all in use: try again later")

    shipping_engine.register = full
    assert shipping_client.post(URL, SOURCE).status_code == 503


def test_needs_the_api_key(make_fake_engine: Any, speak: Any) -> None:
    locked = speak(make_fake_engine(api_key="secret", enable_custom_logit_processor=True))
    assert locked.post(URL, SOURCE).status_code == 401
    assert locked.http.post(URL, json=SOURCE, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_openapi_document(client: Any) -> None:
    path = client.http.get("/openapi.json").json()["paths"][URL]
    schema = path["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert [form["required"] for form in schema["oneOf"]] == [["callable"], ["source", "class_name"]]
