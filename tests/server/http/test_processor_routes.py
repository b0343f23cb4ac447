from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
import pytest

from logitship.client.serialization.processor_string import InstalledProcessor, PickledProcessor, SourceProcessor
from logitship.server.refusals import SHIPPING_IS_OFF, ServiceUnavailable
from tests.helpers.answers import error_of

URL = "/v1/processors"
PICKLED = {"callable": "80"}
SOURCE = {"source": "class A: ...", "class_name": "A"}


MINE = {
    "object": "processor",
    "id": "Mine@1",
    "kind": "registered",
    "name": "Mine",
    "version": 1,
    "digest": "sha256:" + "2" * 64,
    "description": "",
    "params_schema": None,
    "is_mask": False,
    "form": "source",
    "python": None,
    "size": 15,
    "created": None,
}


def test_list(client: Any) -> None:
    ban = {
        **dict.fromkeys(MINE),
        "object": "processor",
        "id": "ban",
        "kind": "installed",
        "name": "ban",
        "description": "Bans tokens.",
        "params_schema": {"type": "object"},
        "is_mask": True,
    }
    assert client.http.get(URL).json() == {"object": "list", "data": [ban, MINE]}


def test_register(shipping_client: Any, shipping_engine: Any) -> None:
    expected = [PickledProcessor(b"\x80"), SourceProcessor("class A: ...", "A"), InstalledProcessor("min_p")]
    for form in (PICKLED, SOURCE, {"name": "min_p"}):
        assert shipping_client.ok(URL, form) == MINE
    assert shipping_engine.registered == [(string, "") for string in expected]


def test_register_under_a_name(shipping_client: Any) -> None:
    assert shipping_client.ok(f"{URL}?name=Lipogram", SOURCE)["id"] == "Lipogram@1"


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("nmae=A", "nmae", "nmae: unknown query parameter: this route has only name"),
        ("name=A&version=2", "version", "unknown query parameter"),
        ("name=A&name=B", "name", "is given more than once"),
        ("x" * 500, "x" * 80, "unknown query parameter"),
    ],
)
def test_unknown_query_parameters_are_refused(
    query: str, param: str, says: str, shipping_client: Any, shipping_engine: Any
) -> None:
    error = error_of(shipping_client.post(f"{URL}?{query}", SOURCE))
    assert error["param"] == param
    assert says in error["message"]
    assert not shipping_engine.registered


def test_details_include_the_source(client: Any, engine: Any) -> None:
    for id in ("Mine@1", "Mine%401"):
        assert client.http.get(f"{URL}/{id}").json() == {
            **MINE,
            "source": "class Mine: ...",
            "class_name": "Mine",
            "source_note": None,
        }
    assert engine.processors.asked_for == [("details", "Mine@1", "")] * 2


@pytest.mark.parametrize("id", ["Other", "sha256:" + "0" * 64, "a/b", "module:Class", ""])
def test_unknown_processor(id: str, client: Any, engine: Any) -> None:
    error = error_of(client.http.get(f"{URL}/{id}"), 404)
    assert error["type"] == "not_found_error"
    assert error["param"] == "id"
    assert engine.processors.asked_for == [("details", id, "")]


def test_delete(client: Any, engine: Any) -> None:
    answer = client.http.delete(f"{URL}/Mine")
    assert answer.json() == {"id": "Mine", "object": "processor", "deleted": True, "ids": ["Mine@1", "Mine@2"]}
    refused = client.http.delete(f"{URL}/ban")
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "id")
    assert engine.processors.asked_for == [("delete", "Mine", ""), ("delete", "ban", "")]


def test_processors_belong_to_a_key(make_fake_engine: Any, make_client: Any) -> None:
    engine = make_fake_engine(api_key=["one", "two"])
    http = make_client(engine).http
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        http.get(f"{URL}/Mine@1", headers=headers)
        http.delete(f"{URL}/Mine@1", headers=headers)
    for method in (http.get, http.delete):
        assert method(f"{URL}/Mine@1").status_code == 401
    tenants = [tenant for _, _, tenant in engine.processors.asked_for]
    assert tenants[0] == tenants[1] != tenants[2] == tenants[3]


@pytest.mark.parametrize("form", [PICKLED, SOURCE])
def test_code_requires_the_flag(form: dict[str, str], client: Any, engine: Any) -> None:
    assert error_of(client.post(URL, form))["message"] == SHIPPING_IS_OFF
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
    error = error_of(shipping_client.http.post(URL, content=body))
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not shipping_engine.registered


def test_details_have_all_fields(client: Any, engine: Any) -> None:
    details = engine.processors.details("Mine@1", "")
    assert client.http.get("/v1/processors/Mine@1").json() == {"object": "processor", **asdict(details)}


def test_size_limit(shipping_client: Any) -> None:
    form = {"source": "#" * (1 << 12), "class_name": "A"}
    assert "more than 4096 bytes" in error_of(shipping_client.post(URL, form), 413)["message"]


def test_at_capacity(shipping_client: Any, shipping_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(string: Any, tenant: str, name: str | None) -> None:
        raise ServiceUnavailable("all in use: try again later")

    monkeypatch.setattr(shipping_engine, "register", full)
    assert shipping_client.post(URL, SOURCE).status_code == 503


def test_api_key_is_required(make_fake_engine: Any, make_client: Any) -> None:
    locked = make_client(make_fake_engine(api_key="secret", enable_custom_logit_processor=True))
    assert locked.post(URL, SOURCE).status_code == 401
    assert locked.http.post(URL, json=SOURCE, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_openapi_document(client: Any) -> None:
    paths = client.http.get("/openapi.json").json()["paths"]
    schema = paths[URL]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert [form["required"] for form in schema["oneOf"]] == [["callable"], ["source", "class_name"], ["name"]]
    (name,) = paths[URL]["post"]["parameters"]
    assert (name["name"], name["in"], name["required"]) == ("name", "query", False)
    for method in ("get", "delete"):
        (id,) = paths[f"{URL}/{{id}}"][method]["parameters"]
        assert (id["name"], id["in"], id["required"]) == ("id", "path", True)
