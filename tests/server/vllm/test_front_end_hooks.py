"""The hooks of the front end, on fakes of vLLM's classes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

import logitship_vllm
from logitship import Client
from logitship.client.http.vllm_handshake import PROBE, PluginInfo
from logitship.client.records import Receipt
from logitship.client.serialization.processor_string import parse
from logitship.server.api_keys import tenant_of
from logitship.server.runtime.hook_target import HookTarget
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.response_receipts import HTTP_RESPONSES, expect_receipts, response_receipts
from logitship.server.runtime.shared_directory import SHARED_DIRECTORY
from logitship.server.vllm import front_end_hooks, params_validation
from logitship.server.vllm.extra_args import read_processors
from logitship.server.vllm.request_tenant import current_tenant, read_tenant, set_tenant
from tests.helpers.app_transport import AppTransport
from tests.server.vllm.conftest import MakeParams

FAULT_TOKEN = 63
PLUGIN = "logitship.server.vllm:LogitshipLogitsProcessor"


class VLLMValidationError(Exception):
    """Fake of vLLM's error with status 400."""


class InputProcessor:
    """Fake of vLLM's class of this name, which calls the plugin."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def validate(self, params: Any) -> None:
        params_validation.admit(params)


class AuthenticationMiddleware:
    """Fake of vLLM's middleware of this name."""

    def verify_token(self, headers: dict[str, str]) -> bool:
        return headers.get("Authorization") in ("Bearer k1", "Bearer k2")


class AuthenticatedApp(FastAPI):
    """Fake of vLLM's application with `--api-key k1 k2`."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        middleware = sys.modules["vllm.entrypoints.serve.middleware.authenticate"].AuthenticationMiddleware()
        headers = {"Authorization": Headers(scope=scope).get("authorization", "")}
        if scope["type"] == "http" and not middleware.verify_token(headers):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def build_app(args: Any, supported_tasks: Any = None, model_config: Any = None) -> FastAPI:
    return AuthenticatedApp()


class FakeLLM:
    """Fake of vLLM's `AsyncLLM`, with the parameters of its functions.

    Attributes:
        added: the stop tokens and tenants of added requests.
        arguments: the `extra_args` of added requests.
        asked: what its workers were asked: the names and the arguments of methods.
        answers: the next answers of its workers, by engine; then none must wait.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.added: list[tuple[list[int], str]] = []
        self.arguments: list[dict[str, Any]] = []
        self.asked: list[tuple[str, dict[str, Any] | None, list[str]]] = []
        self.answers: list[list[list[bool]]] = []

    @property
    def engine_core(self) -> FakeLLM:
        return self

    async def call_utility_all_async(
        self, utility: str, method: str, timeout: None, args: tuple[dict[str, Any] | None, list[str]], kwargs: None
    ) -> list[list[bool]]:
        assert utility == "collective_rpc"
        self.asked.append((method, *args))
        return self.answers.pop(0) if self.answers else [[False, False]]

    async def add_request(self, request_id: str, prompt: str, params: Any) -> str:
        InputProcessor(self.vllm_config).validate(params)
        self.added.append((params.stop_token_ids, read_tenant(params)))
        self.arguments.append(params.extra_args)
        return request_id


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An `AsyncLLM` with hooks."""
    monkeypatch.setenv(SHARED_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("LOGITSHIP_VLLM_ENABLE_CUSTOM_LOGIT_PROCESSOR", "1")
    monkeypatch.setenv("LOGITSHIP_VLLM_PROCESSOR_ISOLATION", "none")
    monkeypatch.setattr(params_validation, "_front_ends", {})
    monkeypatch.setattr(params_validation, "_checks_async_requests", False)
    others = (front_end_hooks.RESPONSES, front_end_hooks.METRICS, *HTTP_RESPONSES)
    monkeypatch.setattr(front_end_hooks, "_wrapped", {each.path for each in others})
    module = ModuleType("vllm.exceptions")
    vars(module)["VLLMValidationError"] = VLLMValidationError
    engine = ModuleType("vllm.v1.engine.async_llm")
    async_llm: Any = type("AsyncLLM", (FakeLLM,), {})
    vars(engine)["AsyncLLM"] = async_llm
    middleware: Any = type("AuthenticationMiddleware", (AuthenticationMiddleware,), {})
    authenticate = ModuleType("vllm.entrypoints.serve.middleware.authenticate")
    vars(authenticate)["AuthenticationMiddleware"] = middleware
    entry = ModuleType("vllm.entrypoints.launchers.api_server.entry")
    vars(entry)["build_app"] = build_app
    packages = (
        *("entrypoints", "entrypoints.serve", "entrypoints.serve.middleware"),
        *("entrypoints.launchers", "entrypoints.launchers.api_server", "v1", "v1.engine"),
    )
    for name in ("vllm", *(f"vllm.{each}" for each in packages)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for each in (module, engine, authenticate, entry):
        monkeypatch.setitem(sys.modules, each.__name__, each)
        parent, _, child = each.__name__.rpartition(".")
        setattr(sys.modules[parent], child, each)
    path = "vllm.v1.engine.async_llm.AsyncLLM"
    targets = (
        HookTarget(f"{path}.__init__", ["vllm_config"], front_end_hooks.start),
        HookTarget(f"{path}.add_request", ["request_id", "prompt", "params"], front_end_hooks.add_request),
    )
    monkeypatch.setattr(front_end_hooks, "TARGETS", targets)
    front_end_hooks.install()
    front_end_hooks.install()  # a process may configure several engines
    config = SimpleNamespace(
        skip_tokenizer_init=True, get_vocab_size=lambda: 64, try_get_generation_config=lambda: {"eos_token_id": 1}
    )
    return async_llm(SimpleNamespace(model_config=config))


def test_processors_are_loaded_once_in_a_thread(
    llm: Any, vllm_params: MakeParams, processor_string: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading: list[bool] = []
    load = PluginProcessors.load

    def recorded(*args: Any) -> Any:
        loading.append(threading.current_thread() is threading.main_thread())
        return load(*args)

    monkeypatch.setattr(PluginProcessors, "load", recorded)
    params = vllm_params({"custom_logit_processor": processor_string})
    assert asyncio.run(llm.add_request("1", "", params)) == "1"
    assert llm.added == [([FAULT_TOKEN], "")]
    assert loading == [False]
    assert not params_validation._checked


def test_other_requests_do_not_wait_for_a_load(
    llm: Any, vllm_params: MakeParams, processor_string: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled request gives its processors back when the load ends."""
    loading, end = threading.Event(), threading.Event()
    load = PluginProcessors.load

    def slow(*args: Any) -> Any:
        loading.set()
        end.wait()
        return load(*args)

    monkeypatch.setattr(PluginProcessors, "load", slow)

    async def run() -> None:
        hanging = asyncio.create_task(
            llm.add_request("1", "", vllm_params({"custom_logit_processor": processor_string}))
        )
        while not loading.is_set():
            await asyncio.sleep(0.01)
        assert await llm.add_request("2", "", vllm_params({})) == "2"
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        end.set()

    asyncio.run(run())  # it joins the threads
    (front_end,) = params_validation._front_ends.values()
    assert front_end.processors.in_use == 0
    assert not params_validation._checked


def test_requests_are_added_when_all_workers_have_loaded_their_processors(
    llm: Any, vllm_params: MakeParams, processor_string: str
) -> None:
    """They are asked with the string again once they no longer wait for it."""
    llm.answers += [[[True, True]], [[False], [False, True]], [[False, False]]]
    args = {"custom_logit_processor": processor_string}
    asyncio.run(llm.add_request("1", "", vllm_params(args)))
    digest = parse(processor_string).digest
    assert llm.asked == [("logitship_must_wait", each, [f"/{digest}"]) for each in (args, None, None, args)]
    assert len(llm.added) == 1


def test_requests_with_the_same_processors_are_asked_about_together(
    llm: Any, vllm_params: MakeParams, processor_string: str
) -> None:
    llm.answers += [[[True]]] * 3
    args = {"custom_logit_processor": processor_string}

    async def run() -> None:
        await asyncio.gather(*(llm.add_request(str(number), "", vllm_params(args)) for number in range(5)))

    asyncio.run(run())
    assert len(llm.asked) == 5
    assert len(llm.added) == 5


def test_workers_are_not_asked_about_built_ins(llm: Any, vllm_params: MakeParams) -> None:
    args = {"custom_logit_processor": '{"name": "disallowed_tokens"}', "custom_params": '{"token_ids": [3]}'}
    asyncio.run(llm.add_request("1", "", vllm_params(args)))
    assert llm.asked == []
    assert len(llm.added) == 1


def test_each_api_key_is_a_tenant(llm: Any, vllm_params: MakeParams, processor_string: str) -> None:
    """A tenant that a client sends is overwritten. Paths without a key have no tenant."""
    middleware = sys.modules["vllm.entrypoints.serve.middleware.authenticate"].AuthenticationMiddleware()

    async def serve(key: str | None, forged: str) -> None:
        if key is not None:
            assert middleware.verify_token({"Authorization": f"Bearer {key}"}) is (key != "wrong")
        params = vllm_params({"custom_logit_processor": processor_string, "logitship_tenant": forged})
        await llm.add_request("1", "", params)

    async def run() -> None:
        first, second = tenant_of("k1"), tenant_of("k2")
        for key in ("k1", "k2", "k1", None, "wrong"):
            await asyncio.create_task(serve(key, second if key == "k1" else first))
        assert [tenant for _, tenant in llm.added] == [first, second, first, "", ""]

    asyncio.run(run())


def test_registered_processors_are_used_by_name_and_digest(
    llm: Any, vllm_params: MakeParams, processor_string: str
) -> None:
    """The engine gets their strings. Each key has registrations of its own."""
    http = TestClient(sys.modules["vllm.entrypoints.launchers.api_server.entry"].build_app(None))
    client = Client("http://testserver", dialect="vllm", api_key="k1", transport=AppTransport(http))
    registered = client.register(json.loads(processor_string))
    other = {"authorization": "Bearer k2"}
    assert http.get("/v1/processors/ChecksHistory").status_code == 401
    assert http.get("/v1/processors/ChecksHistory", headers=other).status_code == 404
    named = {"name": "ChecksHistory"}
    forms: list[dict[str, Any]] = [
        {"custom_logit_processor": json.dumps(named)},
        {"custom_logit_processor": {"digest": registered.digest}},
        {"logits_processors": json.dumps([{"processor": named, "params": {"first": 1}}])},
    ]

    async def send(key: str, args: dict[str, Any]) -> None:
        set_tenant(key)
        await llm.add_request("1", "", vllm_params(args))

    for args in forms:
        asyncio.run(send("k1", args))
    requested = [read_processors(each, 1 << 20) for each in llm.arguments]
    assert [[each.string for each in one] for one in requested] == [[parse(processor_string)]] * 3
    assert [each.params for (each,) in requested] == [None, None, {"first": 1}]
    with pytest.raises(VLLMValidationError, match="no processor is installed or registered as 'ChecksHistory'"):
        asyncio.run(send("k2", forms[0]))


def test_gateway_names_the_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastAPI, "__call__", FastAPI.__call__)
    front_end_hooks._named_by("X-Tenant").wrap()
    app = FastAPI()

    @app.get("/")
    async def tenant() -> str:
        return current_tenant()

    with TestClient(app) as client:
        answers = [client.get("/", headers=headers).json() for headers in ({"x-tenant": "a"}, {"x-tenant": "b"}, {})]
    assert answers == [tenant_of("a"), tenant_of("b"), ""]


def test_refusals_are_errors_of_vllm(llm: Any, vllm_params: MakeParams) -> None:
    with pytest.raises(VLLMValidationError, match="no processor is installed or registered as 'nothing'"):
        asyncio.run(llm.add_request("1", "", vllm_params({"custom_logit_processor": '{"name": "nothing"}'})))
    with pytest.raises(VLLMValidationError) as refused:
        asyncio.run(llm.add_request("1", "", vllm_params(dict(PROBE))))
    assert PluginInfo.from_message(str(refused.value)) == PluginInfo(FAULT_TOKEN)


def test_requests_are_refused_without_the_entry_point(
    llm: Any, vllm_params: MakeParams, processor_string: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(params_validation, "_checks_async_requests", False)
    monkeypatch.setattr(type(llm), "add_request", FakeLLM.add_request)
    with pytest.raises(ValueError, match="add it to VLLM_PLUGINS"):
        asyncio.run(llm.add_request("1", "", vllm_params({"custom_logit_processor": processor_string})))
    with pytest.raises(ValueError, match="fault_token"):
        asyncio.run(llm.add_request("1", "", vllm_params(dict(PROBE))))


def test_unknown_front_end_is_refused_at_start(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end_hooks, "_wrapped", set())
    targets = [HookTarget("vllm.v1.engine.async_llm.AsyncLLM.add_request", ["request"], front_end_hooks.add_request)]
    monkeypatch.setattr(front_end_hooks, "TARGETS", targets)
    with pytest.raises(ValueError, match=r"vLLM 0\.32 and 0\.33, .* takes request_id, prompt, params"):
        front_end_hooks.install()


@pytest.mark.parametrize(("named", "installed"), [(None, []), (["other:Class"], []), ([PLUGIN], ["installed"])])
def test_entry_point_does_nothing_until_the_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, named: list[str] | None, installed: list[str]
) -> None:
    class EngineArgs:
        def create_engine_config(self) -> Any:
            return SimpleNamespace(model_config=SimpleNamespace(logits_processors=named))

    done: list[str] = []
    monkeypatch.setattr(front_end_hooks, "install", lambda: done.append("installed"))
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils", raising=False)
    logitship_vllm.load()  # in a process without a front end
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=EngineArgs))
    logitship_vllm.load()
    assert EngineArgs().create_engine_config().model_config.logits_processors == named
    assert done == installed


def test_metrics_of_vllm_have_those_of_processors(llm: Any, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    assert front_end_hooks.add_metrics(lambda: registry) is registry
    (tmp_path / "logitship-1-0.json").write_text('[["logitship_x", "X.", "counter", [["logitship_x_total", {}, 2.0]]]]')
    assert registry.get_sample_value("logitship_x_total") == 2


def test_receipts_of_prompts_have_the_indices_of_their_choices() -> None:
    """A request has two prompts, with two choices each, which finish in any order."""

    async def generate(llm: Any, prompt: str, params: Any) -> AsyncIterator[Any]:
        for index in (1, 0):
            await asyncio.sleep(0)
            receipts = (Receipt("sha256:0", prompt, index + 1, 0.5),)
            going_on, ended = SimpleNamespace(index=1 - index), SimpleNamespace(index=index, receipts=receipts)
            for each in (going_on, ended):
                vars(each).update(finish_reason=None, stop_reason=None)
            yield SimpleNamespace(outputs=[going_on, ended])

    async def consume(prompt: str) -> None:
        async for _ in front_end_hooks.generate(generate, None, prompt, SimpleNamespace(n=2)):
            pass

    async def run() -> list[Any]:
        expect_receipts()
        await asyncio.gather(consume("first"), consume("second"))
        response = {"choices": [{"index": index, "finish_reason": "stop"} for index in range(4)]}
        receipts = response_receipts()
        assert receipts is not None
        assert receipts.write(response)
        assert not receipts
        return [(each["name"], each["steps"]) for choice in response["choices"] for each in choice["receipts"]]

    assert asyncio.run(run()) == [("first", 1), ("first", 2), ("second", 1), ("second", 2)]
