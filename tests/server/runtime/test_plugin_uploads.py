"""`/v1/processors` and `/v1/artifacts` inside another engine, on a fake of its application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from logitship import Client, CustomLogitProcessor
from logitship.client.errors import BadRequestError, NotFoundError, PermissionDeniedError
from logitship.client.serialization.artifact import digest_of
from logitship.client.serialization.processor_string import InstalledProcessor, RegisteredProcessor, parse
from logitship.sampler.processors.request_view import ModelView
from logitship.server.api_keys import Caller
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.plugin_settings import PluginSettings
from logitship.server.runtime.plugin_setup import for_admission, for_execution
from logitship.server.runtime.plugin_uploads import add_upload_routes
from logitship.server.runtime.request_fields import with_strings
from logitship.server.runtime.shared_directory import SHARED_DIRECTORY
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.vllm.settings import VllmSettings
from tests.helpers.app_transport import AppTransport

MODEL = ModelView(64, frozenset({0}), None)
LOGGER = logging.getLogger()
BIAS = torch.arange(20_000, dtype=torch.float32)
"""Large enough to be uploaded as an artifact."""


class AddsBias(CustomLogitProcessor):
    """Adds a bias."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + BIAS[: logits.shape[-1]]


class Plain(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits


class FrontEnd:
    """A process of an engine that serves HTTP. The name of a key says whether it may ship code."""

    def __init__(self, settings: PluginSettings) -> None:
        self.processors = for_admission(settings, MODEL, LOGGER)
        app = FastAPI()
        app.middleware_stack = app.build_middleware_stack()  # handlers that are added later are not called
        add_upload_routes(app, settings, self.prepare, self.caller)
        self.http = TestClient(app, raise_server_exceptions=False)

    def prepare(self) -> PluginProcessors:
        return self.processors

    def caller(self, request: Request) -> Caller:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        return Caller(key, may_ship=not key.startswith("generates"))

    def client(self, key: str = "one") -> Client:
        return Client("http://testserver", api_key=key, dialect="vllm", transport=AppTransport(self.http))

    def resolve(self, reference: str, tenant: str = "one") -> ProcessorRequest:
        is_digest = reference.startswith("sha256:")
        string = RegisteredProcessor(reference) if is_digest else InstalledProcessor(reference)
        (resolved,) = self.processors.resolve((ProcessorRequest(string, None),), tenant)
        return resolved

    def close(self) -> None:
        self.http.close()
        self.processors.close()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SglangSettings:
    """Settings that run shipped code in this process, because sandboxes take seconds to start."""
    monkeypatch.setenv(SHARED_DIRECTORY, str(tmp_path))
    return SglangSettings(processor_isolation="none")


@pytest.fixture
def front_end(settings: PluginSettings) -> Iterator[Callable[..., FrontEnd]]:
    """Starts another front end of the same engine."""
    started: list[FrontEnd] = []

    def start(**changed: Any) -> FrontEnd:
        started.append(FrontEnd(replace(settings, **changed)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_registered_processors_are_found_by_all_front_ends(front_end: Callable[..., FrontEnd]) -> None:
    first, second = front_end(), front_end()
    registered = first.client().register(Plain, "Mine")
    assert (registered.id, registered.digest) == ("Mine@1", parse(Plain.to_str()).digest)  # type: ignore[union-attr]
    for each in (first, second):
        for reference in ("Mine", "Mine@1", registered.digest):
            resolved = each.resolve(reference)
            assert resolved.string.digest == registered.digest  # type: ignore[union-attr]
            asyncio.run(each.processors.check((resolved,), "one"))
        assert [info.id for info in each.client().processors() if info.kind == "registered"] == ["Mine@1"]
        assert each.client().processor("Mine").digest == registered.digest
    assert second.client().delete_processor(registered) == ["Mine@1"]
    with pytest.raises(ValueError, match="Mine is not registered any more"):
        first.resolve("Mine")
    with pytest.raises(ValueError, match=f"no processor {registered.digest} is registered"):
        first.resolve(registered.digest)


def test_keys_do_not_see_each_other(front_end: Callable[..., FrontEnd]) -> None:
    each = front_end()
    digest = each.client("one").register(Plain).digest
    other = each.client("two")
    assert all(info.kind == "installed" for info in other.processors())
    for use in (other.processor, other.delete_processor):
        for reference in ("Plain", digest):
            with pytest.raises(NotFoundError) as refused:
                use(reference)
            assert (refused.value.type, refused.value.param) == ("not_found_error", "id")
    with pytest.raises(ValueError, match="no processor is installed or registered as 'Plain'"):
        each.resolve("Plain", "two")


def test_artifacts_reach_the_processes_that_run_classes(
    front_end: Callable[..., FrontEnd], settings: PluginSettings
) -> None:
    first, second = front_end(), front_end()
    registered = first.client().register(AddsBias)
    (artifact,) = second.http.get("/v1/artifacts", headers={"authorization": "Bearer one"}).json()["data"]
    assert artifact["size"] == BIAS.nbytes
    resolved = second.resolve(registered.digest)
    asyncio.run(second.processors.check((resolved,), "one"))
    worker = for_execution(settings, MODEL, 1, LOGGER)
    (use,) = worker.load((resolved,), "r", "one")
    assert use.processor.digest == registered.digest
    worker.release([use])
    worker.close()
    headers = {"authorization": "Bearer one"}
    assert second.http.delete(f"/v1/artifacts/{artifact['digest']}", headers=headers).status_code == 200
    assert first.http.get(f"/v1/artifacts/{artifact['digest']}", headers=headers).status_code == 404
    with pytest.raises(ValueError, match=r"the artifact sha256:.* is missing"):
        asyncio.run(first.processors.check((resolved,), "one"))


def test_artifacts_are_uploaded_by_themselves(front_end: Callable[..., FrontEnd]) -> None:
    assert front_end().client().upload_artifact(b"abc") == digest_of(b"abc")


def test_refusals_name_the_variables_of_the_plugin(front_end: Callable[..., FrontEnd], tmp_path: Path) -> None:
    (tmp_path / "allowed").write_text(f"sha256:{'a' * 64}")
    each = front_end(max_processor_size=100, artifact_cache_bytes=1000, allow_processor=str(tmp_path / "allowed"))
    refused = each.http.post("/v1/processors", json={"name": "x" * 200})
    assert refused.status_code == 413
    assert "(LOGITSHIP_SGLANG_MAX_PROCESSOR_SIZE;" in refused.json()["error"]["message"]
    refused = each.http.post("/v1/artifacts", content=bytes(2000), headers={"content-type": "text/plain"})
    assert refused.status_code == 415
    refused = each.http.post("/v1/artifacts", content=bytes(2000))
    assert refused.status_code == 413
    assert "(LOGITSHIP_SGLANG_ARTIFACT_CACHE_BYTES)" in refused.json()["error"]["message"]
    with pytest.raises(PermissionDeniedError, match="LOGITSHIP_SGLANG_SHIPPING_API_KEY"):
        each.client("generates").upload_artifact(b"abc")
    with pytest.raises(PermissionDeniedError, match="lists them with LOGITSHIP_SGLANG_ALLOW_PROCESSOR"):
        each.client().register({"source": "class A: ...", "class_name": "A"})


def test_shipping_may_be_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SHARED_DIRECTORY, str(tmp_path))
    each = FrontEnd(VllmSettings())
    with pytest.raises(BadRequestError, match="LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR=1"):
        each.client().register(Plain)
    with pytest.raises(BadRequestError, match="LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR=1"):
        each.client().upload_artifact(b"abc")
    assert each.client().processor("max_time").kind == "installed"
    each.close()


def test_front_end_that_cannot_start_refuses() -> None:
    def fail() -> Any:
        raise ValueError("shipped processors cannot run in sandboxes: no namespaces")

    app = FastAPI()
    add_upload_routes(app, SglangSettings(), fail, lambda _: Caller("", may_ship=True))
    with TestClient(app) as http:
        refused = http.get("/v1/processors")
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")


def test_without_a_folder_a_front_end_is_alone(monkeypatch: pytest.MonkeyPatch, settings: PluginSettings) -> None:
    monkeypatch.delenv(SHARED_DIRECTORY)
    each = FrontEnd(settings)
    each.client().register(Plain)
    assert each.resolve("Plain") != ProcessorRequest(InstalledProcessor("Plain"), None)
    each.close()


def test_routes_are_not_in_the_document_of_the_engine(front_end: Callable[..., FrontEnd]) -> None:
    """Their schemas are not there."""
    assert front_end().http.get("/openapi.json").json()["paths"] == {}


def test_strings_take_the_place_of_names() -> None:
    installed, source = InstalledProcessor("a"), parse('{"source": "class A: ...", "class_name": "A"}')
    text = '{"source":"class A: ...","class_name":"A"}'
    found = (ProcessorRequest(installed, None), ProcessorRequest(source, {"x": 1}, own=True))
    entries = [{"processor": {"name": "a"}}, {"processor": {"name": "B"}, "params": {"x": 1}}]
    expected = [{"processor": '{"name":"a"}'}, {"processor": text, "params": {"x": 1}}]
    assert with_strings(entries, found) == expected
    assert with_strings({"name": "B"}, found[1:]) == text
    assert parse(with_strings('{"name": "B"}', found[1:])) == source
    assert with_strings('[{"processor": "B"}]', found[1:]).startswith('[{"processor":"{')
