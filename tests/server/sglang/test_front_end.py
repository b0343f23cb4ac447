from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from logitship import Client
from logitship.builtin_processors import installed_processors
from logitship.builtin_processors.parts.sampling_rule import RandomRowsProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS
from logitship.client.http.sglang_handshake import PROBE, PROBE_BODY, SglangPlugin
from logitship.client.serialization.processor_string import parse
from logitship.sampler.processors.request_view import ModelView
from logitship.server.api_keys import tenant_of
from logitship.server.runtime.plugin_uploads import add_upload_routes
from logitship.server.sglang import hooks
from logitship.server.sglang.front_end import SHIPPING_KEY_HEADER, FrontEnd
from logitship.server.sglang.generate_fields import ADMITTED, read_mark, read_processors
from logitship.server.sglang.sglang_settings import SglangSettings
from tests.helpers.app_transport import AppTransport
from tests.helpers.processors import CHECKS_HISTORY

SOURCE = json.dumps({"source": CHECKS_HISTORY.source, "class_name": "ChecksHistory"})
COUNTS = json.dumps(
    {
        "class_name": "Counts",
        "source": "from logitship import CustomLogitProcessor\n"
        "class Counts(CustomLogitProcessor):\n"
        "    params_schema = {'required': ['sentences']}\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        return logits\n",
    }
)
FORBIDS = json.dumps({"name": "disallowed_tokens"})
SAMPLERS = [
    "dry",
    "entropy_stop",
    *sorted(each.name for each in BUILTIN_PROCESSORS if issubclass(each, RandomRowsProcessor)),
]


def generate(string: Any, **params: Any) -> Any:
    return with_sampling_params(string, {"custom_params": params or None})


def with_sampling_params(string: Any, sampling_params: Any) -> Any:
    return SimpleNamespace(custom_logit_processor=string, sampling_params=sampling_params, text="hi", input_ids=None)


def http_request(**headers: str) -> Any:
    return SimpleNamespace(headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.fixture
def front_end(settings: SglangSettings, model: ModelView) -> FrontEnd:
    return FrontEnd(settings, model, skips_processors=False)


def test_valid_processors_are_admitted(front_end: FrontEnd) -> None:
    asyncio.run(front_end.admit(generate(None), None))
    asyncio.run(front_end.admit(generate(SOURCE), None))
    asyncio.run(front_end.admit(generate(FORBIDS, token_ids=[1]), None))
    assert front_end.prepared().in_use == 0


def test_admitted_strings_are_marked(front_end: FrontEnd) -> None:
    """A process of SGLang without the plugin could not unpickle them."""
    request = generate(FORBIDS, token_ids=[1])
    asyncio.run(front_end.admit(request, None))
    assert request.custom_logit_processor == f"{ADMITTED}:{FORBIDS}"
    refused = generate(FORBIDS)
    with pytest.raises(ValueError, match="parameters of disallowed_tokens"):
        asyncio.run(front_end.admit(refused, None))
    assert refused.custom_logit_processor == FORBIDS


def test_registered_processors_are_used_by_name_and_digest(
    settings: SglangSettings, model: ModelView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler gets their strings. Each key has registrations of its own."""
    front_ends: list[FrontEnd] = []

    def make(*args: Any, **kwargs: Any) -> FrontEnd:
        front_ends.append(FrontEnd(settings, model, "k1", skips_processors=False))
        return front_ends[-1]

    app = FastAPI()
    monkeypatch.setitem(sys.modules, hooks.HTTP_SERVER, SimpleNamespace(app=app))
    arguments = SimpleNamespace(
        enable_custom_logit_processor=True, enable_metrics=False, api_key="k1", speculative_algorithm=None
    )
    monkeypatch.setattr(hooks, "resolved_arguments", lambda _: arguments)
    monkeypatch.setattr(hooks, "skips_processors", lambda _: False)
    for name in ("check_configuration", "apply_hooks", "served_model"):
        monkeypatch.setattr(hooks, name, lambda *_: None)
    monkeypatch.setattr(hooks, "FrontEnd", make)
    hooks.make_front_end(lambda *_: None, SimpleNamespace(model_config=None), None)
    (front_end,) = front_ends
    http = TestClient(app)
    client = Client("http://testserver", dialect="sglang", api_key="k1", transport=AppTransport(http))
    registered = client.register(json.loads(SOURCE))
    assert http.get("/v1/processors/ChecksHistory").status_code == 404
    named, digest = json.dumps({"name": "ChecksHistory"}), json.dumps({"digest": registered.digest})
    several = json.dumps([{"processor": {"name": "ChecksHistory"}, "params": {"first": 1}}])
    for string in (named, digest, several):
        request = generate(string)
        asyncio.run(front_end.admit(request, http_request(authorization="Bearer k1")))
        tenant, sent = read_mark(request.custom_logit_processor)
        (found,) = read_processors(sent, 1 << 20)
        assert (tenant, found.string) == (tenant_of("k1"), parse(SOURCE))
        assert found.params == ({"first": 1} if string == several else None)
    with pytest.raises(ValueError, match="no processor is installed or registered as 'ChecksHistory'"):
        asyncio.run(front_end.admit(generate(named), http_request()))


def test_shipping_key_registers_for_others(model: ModelView) -> None:
    """A name has no code: requests with it need no such key, but the registrations are those of a tenant."""
    settings = SglangSettings(processor_isolation="none", shipping_api_key=["ships"])
    front_end = FrontEnd(settings, model, "generates", skips_processors=False)
    digest = json.dumps({"digest": parse(SOURCE).digest})  # type: ignore[union-attr]
    app = FastAPI()
    add_upload_routes(app, settings, front_end.prepared, front_end.caller)
    http = TestClient(app)
    headers = {"authorization": "Bearer generates", SHIPPING_KEY_HEADER: "ships"}
    assert http.post("/v1/processors", content=SOURCE, headers={"authorization": "Bearer generates"}).status_code == 403
    assert http.post("/v1/processors", content=SOURCE, headers=headers).status_code == 200
    asyncio.run(front_end.admit(generate(digest), http_request(authorization="Bearer generates")))


def test_each_string_is_parsed_once(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a few kilobytes may use a large one with thousands of parameters."""
    parsed: list[str] = []

    def read(string: str, max_size: int) -> Any:
        parsed.append(string)
        return read_processors(string, max_size)

    monkeypatch.setattr("logitship.server.sglang.front_end.read_processors", read)
    params: list[dict[str, Any]] = [{"custom_params": {"token_ids": [number]}} for number in range(60)]
    asyncio.run(front_end.admit(with_sampling_params(FORBIDS, params), None))
    assert parsed == [FORBIDS]
    params[7] = {"custom_params": {"token_ids": "x"}}
    with pytest.raises(ValueError, match="parameters of disallowed_tokens"):
        asyncio.run(front_end.admit(with_sampling_params(FORBIDS, params), None))


def test_beam_search_is_refused(front_end: FrontEnd) -> None:
    """SGLang would ignore the processor."""
    request = generate(FORBIDS, token_ids=[1])
    request.sampling_params["beam_width"] = 2
    with pytest.raises(ValueError, match="does not call processors in a beam search"):
        asyncio.run(front_end.admit(request, None))


@pytest.mark.parametrize(
    ("string", "message"),
    [
        ("nonsense", "is not JSON"),
        (json.dumps({"source": "1 / 0", "class_name": "A"}), "ZeroDivisionError"),
        ([FORBIDS], "because there is one prompt"),
        (FORBIDS, "parameters of disallowed_tokens"),
        (COUNTS, r"parameters of Counts: params: 'sentences' is a required property"),
    ],
)
def test_what_cannot_run_is_refused(front_end: FrontEnd, string: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(front_end.admit(generate(string), None))


def test_speculation_is_refused(settings: SglangSettings, model: ModelView) -> None:
    """SGLang answers 400 for a `ValueError`, as type `BadRequestError`."""
    front_end = FrontEnd(settings, model, skips_processors=True)
    asyncio.run(front_end.admit(generate(None), None))
    with pytest.raises(ValueError, match="decodes speculatively"):
        asyncio.run(front_end.admit(generate(FORBIDS, token_ids=[1]), None))


def test_only_listed_processors_are_admitted(tmp_path: Path, model: ModelView) -> None:
    (tmp_path / "allowed").write_text(f"sha256:{'a' * 64}")
    settings = SglangSettings(processor_isolation="none", allow_processor=str(tmp_path / "allowed"))
    with pytest.raises(ValueError, match="LOGITSHIP_SGLANG_ALLOW_PROCESSOR"):
        asyncio.run(FrontEnd(settings, model, skips_processors=False).admit(generate(SOURCE), None))


@pytest.mark.parametrize(
    ("string", "request_", "may"),
    [
        (SOURCE, http_request(authorization="Bearer second"), True),
        (SOURCE, http_request(x_logitship_shipping_key="first"), True),
        (SOURCE, http_request(authorization="Bearer third"), False),
        (SOURCE, http_request(authorization="Basic first"), False),
        (SOURCE, http_request(), False),
        (SOURCE, None, True),
        (FORBIDS, http_request(), True),
    ],
)
def test_code_needs_a_shipping_key(model: ModelView, string: str, request_: Any, may: bool) -> None:
    settings = SglangSettings(processor_isolation="none", shipping_api_key=("first", "second"))
    admission = FrontEnd(settings, model, skips_processors=False).admit(generate(string, token_ids=[1]), request_)
    if may:
        asyncio.run(admission)
    else:
        with pytest.raises(ValueError, match="not ship processors"):
            asyncio.run(admission)


def test_each_key_is_a_tenant(model: ModelView) -> None:
    """A client cannot name a tenant, unless the operator trusts a gateway's header."""

    def tenant(settings: SglangSettings, api_key: str | None = None, **headers: str) -> str:
        request = generate(FORBIDS, token_ids=[1])
        front_end = FrontEnd(settings, model, api_key, skips_processors=False)
        asyncio.run(front_end.admit(request, http_request(**headers)))
        found, string = read_mark(request.custom_logit_processor)
        assert string == FORBIDS
        return found

    keys = SglangSettings(processor_isolation="none", shipping_api_key=("a", "b"))
    assert tenant(keys, authorization="Bearer a") == tenant_of("a")
    assert tenant(keys, authorization="Bearer b") == tenant_of("b")
    assert tenant(keys, "c", authorization="Bearer c") == tenant_of("c")
    assert tenant(keys, "c", authorization="Bearer c", x_logitship_shipping_key="b") == tenant_of("b")
    assert tenant(keys, x_tenant="d") == tenant(SglangSettings(processor_isolation="none"), x_tenant="d") == ""
    gateway = SglangSettings(processor_isolation="none", tenant_header="x-tenant")
    assert tenant(gateway, x_tenant="d") == tenant_of("d")
    assert tenant(gateway) == ""
    assert (keys.num_keys, gateway.num_keys) == (2, 0)


@pytest.mark.parametrize("tenant", ["", "a1"])
def test_mark_of_a_client_is_refused(front_end: FrontEnd, tenant: str) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        asyncio.run(front_end.admit(generate(f"{ADMITTED}{tenant}:{FORBIDS}", token_ids=[1]), None))


def default_settings(**settings: Any) -> SglangSettings:
    """Return settings with a processor of every request, `DEFAULT`."""
    default = 'disallowed_tokens={"token_ids": [5]}'
    return SglangSettings(processor_isolation="none", default_processor=[default], **settings)


DEFAULT = {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [5]}}


def test_processor_of_every_request(model: ModelView) -> None:
    front_end = FrontEnd(default_settings(), model, skips_processors=False)

    def admitted(request: Any) -> Any:
        asyncio.run(front_end.admit(request, None))
        strings = request.custom_logit_processor
        read = [json.loads(read_mark(each)[1]) for each in (strings if isinstance(strings, list) else [strings])]
        return read if isinstance(strings, list) else read[0]

    assert admitted(generate(None)) == admitted(generate("")) == [DEFAULT]
    assert admitted(generate(FORBIDS, token_ids=[1])) == [{"processor": FORBIDS}, DEFAULT]
    assert admitted(generate(json.dumps([DEFAULT, {"processor": FORBIDS, "params": {"token_ids": [1]}}]))) == [
        DEFAULT,
        {"processor": FORBIDS, "params": {"token_ids": [1]}},
        DEFAULT,
    ]
    several = generate([FORBIDS, None], token_ids=[1])
    several.text = ["one", "two"]
    assert admitted(several) == [[{"processor": FORBIDS}, DEFAULT], [DEFAULT]]
    for wrong in ("[", FORBIDS, json.dumps([{"processor": FORBIDS, "params": {"token_ids": [1]}}] * 64)):
        with pytest.raises(ValueError, match=r"is not JSON|token_ids: missing|1 to 64 processors"):
            asyncio.run(front_end.admit(generate(wrong), None))
    embedding = SimpleNamespace(text="hi", input_ids=None, sampling_params=None)
    asyncio.run(front_end.admit(embedding, None))
    assert not hasattr(embedding, "custom_logit_processor")


def test_class_of_the_operator_needs_no_shipping_key(model: ModelView, tmp_path: Path) -> None:
    (tmp_path / "class.json").write_text(SOURCE)
    entry = f"ChecksHistory=@{tmp_path / 'class.json'}"
    settings = SglangSettings(processor_isolation="none", default_processor=[entry], shipping_api_key=["ships"])
    front_end = FrontEnd(settings, model, skips_processors=False)
    asyncio.run(front_end.admit(generate(None), http_request()))
    with pytest.raises(ValueError, match="not ship processors"):
        asyncio.run(front_end.admit(generate(SOURCE), http_request()))


def test_processor_of_every_request_is_not_skipped(model: ModelView) -> None:
    front_end = FrontEnd(default_settings(), model, skips_processors=True)
    with pytest.raises(ValueError, match="decodes speculatively"):
        asyncio.run(front_end.admit(generate(None), None))


def test_probe_is_answered(front_end: FrontEnd) -> None:
    assert PROBE_BODY["custom_logit_processor"] == PROBE
    with pytest.raises(ValueError, match="plugin") as caught:
        asyncio.run(front_end.admit(generate(PROBE), None))
    assert SglangPlugin.from_message(str(caught.value)) == SglangPlugin(speculates=False)
    assert SglangPlugin.from_message("max_new_tokens must be at least 0, got -1.") is None
    assert SglangPlugin.from_message("logitship plugin for SGLang: ?") is None


def test_settings_from_the_environment() -> None:
    settings = SglangSettings.from_environment(
        {"LOGITSHIP_SGLANG_SHIPPING_API_KEY": "a, b", "LOGITSHIP_SGLANG_MAX_SANDBOXES": "3", "LOGITSHIP_VLLM_X": "1"}
    )
    assert settings.shipping_api_key == ("a", "b")
    assert settings.max_sandboxes == 3
    with pytest.raises(ValueError, match="LOGITSHIP_SGLANG_X: there is no such setting"):
        SglangSettings.from_environment({"LOGITSHIP_SGLANG_X": "1"})
    with pytest.raises(ValueError, match=r"SHIPPING_API_KEY: must be keys, separated by commas$"):
        SglangSettings.from_environment({"LOGITSHIP_SGLANG_SHIPPING_API_KEY": "a,,b"})  # the log must not have them


def test_thread_that_cannot_start(settings: SglangSettings, model: ModelView, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is refused, and the next one is served. SGLang starts without the thread that prepares sandboxes."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    front_end = FrontEnd(settings, model, skips_processors=False)

    async def admit_without_threads() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            front_end.prepare()
            with pytest.raises(ValueError, match=r"custom_logit_processor: .* try again later"):
                await front_end.admit(generate(SOURCE), None)
        await front_end.admit(generate(SOURCE), None)

    asyncio.run(admit_without_threads())


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_are_admitted_by_name(front_end: FrontEnd, name: str) -> None:
    processor = installed_processors().get(name)
    params = {**processor.example, **({"dry_sequence_breakers": []} if name == "dry" else {})}
    request = generate(json.dumps({"name": name}), **params)
    asyncio.run(front_end.admit(request, None))
    assert request.custom_logit_processor == f"{ADMITTED}:{json.dumps({'name': name})}"
