"""Detection of the server and translation of requests, with both clients."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import orjson
import pytest
import torch

from logitship.client.async_client import AsyncClient
from logitship.client.client import Client
from logitship.client.errors import (
    AuthenticationError,
    BadRequestError,
    GenerationError,
    LogitshipError,
    ProcessorSerializationError,
    ServerBusyError,
)
from logitship.client.http.server_dialect import ServerKind
from logitship.client.http.sglang_handshake import NOT_ENABLED, PROBE, PROBE_BODY, SglangPlugin
from logitship.client.http.vllm_handshake import PluginInfo
from logitship.client.processor import CustomLogitProcessor
from logitship_sglang import NOT_RUN

FAULT = 63
OTHER_END_TOKEN = 62
SHIPPED = '{"callable": "80"}'
MESSAGES = [{"role": "user", "content": "Hi"}]
SGLANG_ANSWER = {"text": "Hi", "output_ids": [1], "meta_info": {"id": "r", "finish_reason": {"type": "length"}}}


class FakeServer:
    """Fake server that logs its requests.

    Args:
        owner: `owned_by` in `/v1/models`; None: the route does not exist.
        plugin: whether vLLM or SGLang has logitship's plugin.
        stop_reason: `stop_reason` of its completions.
        refusal: SGLang's answer to the probe without the plugin.
    """

    def __init__(
        self,
        owner: str | None,
        *,
        plugin: bool = True,
        stop_reason: int | str | None = None,
        refusal: str = "max_new_tokens must be at least 0, got -1.",
    ) -> None:
        self.owner = owner
        self.refusal = refusal
        self.plugin = plugin
        self.stop_reason = stop_reason
        self.paths: list[str] = []
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = orjson.loads(request.content) if request.content else {}
        self.paths.append(path)
        self.bodies.append(body)
        if path == "/v1/models":
            return self._models()
        if path == "/generate" and body.get("custom_logit_processor") == PROBE:
            message = SglangPlugin(speculates=False).to_message() if self.plugin else self.refusal
            return httpx.Response(400, json={"error": {"message": message}})
        if path == "/generate":
            return httpx.Response(200, json=SGLANG_ANSWER) if self.owner != "vllm" else httpx.Response(404)
        if body.get("vllm_xargs") == {"logitship": "about"} and self.plugin:
            error = {"message": PluginInfo(FAULT).to_message(), "type": "BadRequestError", "param": None, "code": 400}
            return httpx.Response(400, json={"error": error})
        return self._completion(body, "chat" in path)

    def _models(self) -> httpx.Response:
        if self.owner is None:
            return httpx.Response(404, json={"detail": "Not Found"})
        return httpx.Response(200, json={"data": [{"id": "m", "owned_by": self.owner}]})

    def _completion(self, body: Any, chat: bool) -> httpx.Response:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": self.stop_reason,
            "token_ids": [1, 2],
        }
        if not body.get("stream"):
            choice |= {"message": {"content": "Hi"}} if chat else {"text": "Hi"}
            return httpx.Response(200, json={"id": "c", "choices": [choice]})
        choice |= {"delta": {"content": "Hi"}} if chat else {"text": "Hi"}
        event = orjson.dumps({"id": "c", "choices": [choice]})
        return httpx.Response(200, content=b"data: " + event + b"\n\ndata: [DONE]\n\n")


class AnyClient:
    """Caller of several methods of one sync or async client."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def __call__(
        self, handler: Any, *calls: tuple[str, Any, dict[str, Any]], dialect: ServerKind = "auto"
    ) -> list[Any]:
        transport = httpx.MockTransport(handler)
        if self.asynchronous:
            return asyncio.run(self._call_async(transport, calls, dialect))
        with Client("http://server", dialect=dialect, transport=transport, max_retries=0) as client:
            results = []
            for method, prompt, options in calls:
                result = getattr(client, method)(prompt, **options)
                results.append(list(result) if inspect.isgenerator(result) else result)
            return results

    async def _call_async(self, transport: httpx.MockTransport, calls: Any, dialect: ServerKind) -> list[Any]:
        async with AsyncClient("http://server", dialect=dialect, transport=transport, max_retries=0) as client:
            results = []
            for method, prompt, options in calls:
                result = getattr(client, method)(prompt, **options)
                results.append([chunk async for chunk in result] if inspect.isasyncgen(result) else await result)
            return results


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> AnyClient:
    return AnyClient(request.param)


ONE_OF_EACH = [
    ("generate", "Hi", {"processor": SHIPPED, "max_new_tokens": 2}),
    ("completions", "Hi", {"processor": SHIPPED, "max_tokens": 2}),
    ("chat", MESSAGES, {"processor": SHIPPED, "max_tokens": 2}),
]


@pytest.mark.parametrize("owner", ["logitship", "somebody", None])
def test_server_is_probed_once(call: AnyClient, owner: str | None) -> None:
    server = FakeServer(owner)
    answers = call(server, *ONE_OF_EACH)
    assert [answer.text for answer in answers] == ["Hi"] * 3
    assert server.paths == ["/v1/models", "/generate", "/v1/completions", "/v1/chat/completions"]
    assert [body["custom_logit_processor"] for body in server.bodies[1:]] == [SHIPPED] * 3


def test_sglang_is_asked_for_its_plugin_once(call: AnyClient) -> None:
    """The probe is the request that no SGLang generates."""
    server = FakeServer("sglang")
    answers = call(server, ("generate", "Hi", {}), *ONE_OF_EACH)
    assert [answer.text for answer in answers] == ["Hi"] * 4
    paths = ["/v1/models", "/generate", "/generate", "/generate", "/v1/completions", "/v1/chat/completions"]
    assert server.paths == paths
    assert server.bodies[2] == PROBE_BODY
    assert [body["custom_logit_processor"] for body in server.bodies[3:]] == [SHIPPED] * 3


def test_several_processors_for_sglang_are_one_string(call: AnyClient) -> None:
    server = FakeServer("sglang")
    entries = [{"processor": SHIPPED, "params": {"a": 1}}, {"processor": SHIPPED}]
    call(server, ("generate", "Hi", {"logits_processors": entries}))
    assert "logits_processors" not in server.bodies[2]
    assert orjson.loads(server.bodies[2]["custom_logit_processor"]) == entries


def test_sglang_without_plugin_is_warned_about(call: AnyClient) -> None:
    server = FakeServer("sglang", plugin=False)
    with pytest.warns(UserWarning, match="the SGLang at server unpickles processors in its own processes"):
        answers = call(server, *ONE_OF_EACH)
    assert [answer.text for answer in answers] == ["Hi"] * 3


def test_sglang_that_takes_no_processors_is_not_warned_about(call: AnyClient) -> None:
    server = FakeServer("sglang", plugin=False, refusal=f"The server is {NOT_ENABLED}. Please set …")
    assert call(server, ONE_OF_EACH[0])[0].text == "Hi"


def test_sglang_whose_plugin_could_not_be_installed_says_so(call: AnyClient) -> None:
    """Nothing is unpickled there, so there is nothing to warn about."""
    server = FakeServer("sglang", plugin=False, refusal=NOT_RUN)
    with pytest.raises(BadRequestError, match="its plugin could not be installed there: the server's log says why"):
        call(server, ONE_OF_EACH[0])
    assert server.paths == ["/v1/models", "/generate"]


@pytest.mark.parametrize("plugin", [False, True])
def test_given_sglang_is_only_asked_about_several_processors(call: AnyClient, plugin: bool) -> None:
    """Without the plugin, it would ignore them."""
    server = FakeServer("sglang", plugin=plugin, refusal=f"The server is {NOT_ENABLED}. Please set …")
    entries = [{"processor": SHIPPED}, {"processor": SHIPPED}]
    calls = [ONE_OF_EACH[0], ("generate", "Hi", {"logits_processors": entries})]
    if plugin:
        call(server, *calls, dialect="sglang")
        assert server.paths == ["/generate"] * 3
        assert [body["custom_logit_processor"] for body in server.bodies[:2]] == [SHIPPED, PROBE]
        assert orjson.loads(server.bodies[2]["custom_logit_processor"]) == entries
    else:
        with pytest.raises(ValueError, match="only SGLang with logitship's plugin runs several processors"):
            call(server, *calls, dialect="sglang")
        assert [body["custom_logit_processor"] for body in server.bodies] == [SHIPPED, PROBE]


def test_each_sglang_without_plugin_is_warned_about() -> None:
    """Python shows the same text once."""
    for address in ("one", "two:8000"):
        transport = httpx.MockTransport(FakeServer("sglang", plugin=False))
        with (
            Client(f"http://me:secret@{address}", transport=transport) as client,
            pytest.warns(UserWarning, match=f"^the SGLang at {address} unpickles"),
        ):
            client.generate("Hi", processor=SHIPPED)


def test_fault_inside_sglang_has_its_traceback(call: AnyClient) -> None:
    traceback = 'Traceback (most recent call last):\n  File "p.py", line 3, in __call__\nRuntimeError: no\n'
    message = f"ProcessorFault: processor P raised RuntimeError: no\n{traceback}"

    def server(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": message}})

    with pytest.raises(GenerationError, match=r"^processor P raised RuntimeError: no") as caught:
        call(server, ("generate", "Hi", {"processor": SHIPPED}), dialect="sglang")
    assert caught.value.type == "ProcessorFault"
    assert caught.value.traceback == traceback
    assert caught.value.message == "processor P raised RuntimeError: no"


def test_vllm_requests_are_translated(call: AnyClient) -> None:
    server = FakeServer("vllm")
    answers = call(server, *ONE_OF_EACH)
    assert [answer.text for answer in answers] == ["Hi"] * 3
    assert answers[0].output_ids == (1, 2)
    assert [answer.receipts for answer in answers] == [()] * 3
    assert server.paths == ["/v1/models", *["/v1/completions"] * 3, "/v1/chat/completions"]
    assert [body["vllm_xargs"] for body in server.bodies[2:]] == [{"custom_logit_processor": SHIPPED}] * 3
    assert [body["max_tokens"] for body in server.bodies[2:]] == [2] * 3


def test_vllm_streams(call: AnyClient) -> None:
    server = FakeServer("vllm")
    options = {"processor": SHIPPED}
    chunks = call(
        server,
        ("generate_stream", "Hi", options),
        ("completions_stream", "Hi", options),
        ("chat_stream", MESSAGES, options),
    )
    assert [[chunk.text for chunk in stream] for stream in chunks] == [["Hi"]] * 3


@pytest.mark.parametrize("method", ["completions", "chat"])
def test_no_probe_without_processor(call: AnyClient, method: str) -> None:
    server = FakeServer("vllm")
    call(server, (method, "Hi" if method == "completions" else MESSAGES, {"max_tokens": 2}))
    assert server.paths == ["/v1/completions" if method == "completions" else "/v1/chat/completions"]


def test_generate_without_processor_needs_no_plugin(call: AnyClient) -> None:
    server = FakeServer("vllm", plugin=False)
    assert call(server, ("generate", "Hi", {}))[0].text == "Hi"
    assert server.paths == ["/v1/models", "/v1/completions"]


@pytest.mark.parametrize("dialect", ["logitship", "sglang"])
def test_given_dialect_is_not_probed(call: AnyClient, dialect: ServerKind) -> None:
    server = FakeServer("vllm")
    call(server, ("completions", "Hi", {"processor": SHIPPED}), dialect=dialect)
    assert server.paths == ["/v1/completions"]
    assert server.bodies[0]["custom_logit_processor"] == SHIPPED


def test_given_vllm_only_probes_plugin(call: AnyClient) -> None:
    server = FakeServer("vllm")
    call(server, ("completions", "Hi", {"processor": SHIPPED, "model": "m"}), dialect="vllm")
    question = {"prompt": "?", "max_tokens": 1, "vllm_xargs": {"logitship": "about"}, "model": "m"}
    assert server.bodies[0] == question
    assert server.paths == ["/v1/completions"] * 2


def test_vllm_without_plugin_is_refused(call: AnyClient) -> None:
    server = FakeServer("vllm", plugin=False)
    with pytest.raises(LogitshipError, match=r"runs without logitship's plugin .* --logits-processors"):
        call(server, ("chat", MESSAGES, {"processor": SHIPPED}))
    assert server.paths == ["/v1/models", "/v1/completions"]


@pytest.mark.parametrize("method", ["generate", "completions", "chat"])
@pytest.mark.parametrize("suffix", ["", "_stream"])
def test_fault_token_raises_processor_fault(call: AnyClient, method: str, suffix: str) -> None:
    server = FakeServer("vllm", stop_reason=FAULT)
    prompt: Any = MESSAGES if method == "chat" else "Hi"
    with pytest.raises(GenerationError, match=r"a processor of the request failed, .* the server's log") as caught:
        call(server, (method + suffix, prompt, {"processor": SHIPPED}))
    assert caught.value.type == "ProcessorFault"
    assert caught.value.partial.finish_reason.matched == FAULT


def test_other_end_token_is_no_fault(call: AnyClient) -> None:
    """Models may have several EOS tokens, and vLLM reports all but one of them as `stop_reason`."""
    server = FakeServer("vllm", stop_reason=OTHER_END_TOKEN)
    (answer,) = call(server, ("completions", "Hi", {"processor": SHIPPED}))
    assert answer.finish_reason.matched == OTHER_END_TOKEN


def test_fault_token_ignored_without_processor(call: AnyClient) -> None:
    server = FakeServer("vllm")
    options: dict[str, Any] = {"processor": SHIPPED}

    def handler(request: httpx.Request) -> httpx.Response:
        server.stop_reason = None if b"custom_logit_processor" in request.content else FAULT
        return server(request)

    _, answer = call(handler, ("completions", "Hi", options), ("completions", "Hi", {}))
    assert answer.finish_reason.matched == FAULT


@pytest.mark.parametrize(
    ("status", "error"), [(401, AuthenticationError), (503, ServerBusyError), (400, BadRequestError)]
)
def test_failed_probe_is_repeated(status: int, error: type[Exception]) -> None:
    server = FakeServer("vllm")
    refusals = [httpx.Response(status, json={"error": {"message": "not now"}})]

    def handler(request: httpx.Request) -> httpx.Response:
        return refusals.pop() if refusals else server(request)

    with Client("http://server", transport=httpx.MockTransport(handler), max_retries=0) as client:
        with pytest.raises(error, match="not now"):
            client.completions("Hi", processor=SHIPPED)
        assert client.completions("Hi", processor=SHIPPED).text == "Hi"
    assert server.paths == ["/v1/models", "/v1/completions", "/v1/completions"]


@pytest.mark.parametrize(("status", "error"), [(401, AuthenticationError), (503, ServerBusyError)])
def test_failed_probe_of_sglang_is_repeated(status: int, error: type[Exception]) -> None:
    server = FakeServer("sglang")
    refusals = [httpx.Response(status, json={"error": {"message": "not now"}})]

    def handler(request: httpx.Request) -> httpx.Response:
        return refusals.pop() if refusals and request.url.path == "/generate" else server(request)

    with Client("http://server", transport=httpx.MockTransport(handler), max_retries=0) as client:
        with pytest.raises(error, match="not now"):
            client.generate("Hi", processor=SHIPPED)
        assert client.generate("Hi", processor=SHIPPED).text == "Hi"
    assert server.paths == ["/v1/models", "/generate", "/generate"]
    assert [body.get("custom_logit_processor") for body in server.bodies] == [None, PROBE, SHIPPED]


def test_unrelated_vllm_error_is_raised(call: AnyClient) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "no such model"}})

    with pytest.raises(BadRequestError, match="no such model"):
        call(handler, ("chat", MESSAGES, {"processor": SHIPPED}), dialect="vllm")


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"data": []}', b'{"data": [{}]}'])
def test_malformed_models_response(call: AnyClient, answer: bytes) -> None:
    server = FakeServer("logitship")

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=answer) if request.url.path == "/v1/models" else server(request)

    assert call(handler, ("generate", "Hi", {}))[0].text == "Hi"
    assert server.paths == ["/generate"]


def test_unsupported_option_is_not_sent_to_vllm(call: AnyClient) -> None:
    server = FakeServer("vllm")
    with pytest.raises(ValueError, match="logprob_start_len"):
        call(server, ("generate", "Hi", {"return_logprob": True, "logprob_start_len": 0}), dialect="vllm")
    assert server.paths == []


def test_threads_share_detected_dialect() -> None:
    server = FakeServer("vllm")
    together = threading.Barrier(4)
    with Client("http://server", transport=httpx.MockTransport(server)) as client, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> str:
            together.wait()
            return client.completions("Hi", processor=SHIPPED).text

        assert list(pool.map(ask, range(4))) == ["Hi"] * 4
        asked = len(server.paths)
        assert client.completions("Hi", processor=SHIPPED).text == "Hi"
    assert len(server.paths) == asked + 1
    assert sum(body.get("vllm_xargs") == {"custom_logit_processor": SHIPPED} for body in server.bodies) == 5


def test_unknown_dialect() -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="dialect: expected one of auto, logitship, sglang, vllm, not 'tgi'"):
            kind("http://server", dialect=cast(ServerKind, "tgi"))


TABLE = torch.zeros(140_000)


class Huge(CustomLogitProcessor):
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        return logits + TABLE[0]


class LimitedServer:
    """A logitship server that says how long a processor string may be, unless `limit` is None."""

    def __init__(self, limit: int | None, owner: str = "logitship") -> None:
        self.limit = limit
        self.owner = owner
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": self.owner}]})
        if request.url.path == "/server_info":
            return httpx.Response(200, json={} if self.limit is None else {"max_processor_size": self.limit})
        return httpx.Response(200, json=SGLANG_ANSWER)


def test_string_that_is_too_long_is_not_sent(call: AnyClient) -> None:
    server = LimitedServer(1 << 20)
    with pytest.raises(ProcessorSerializationError, match=r"at most 1,048,576 \(--max-processor-size\)") as raised:
        call(server, ("generate", "Hi", {"processor": Huge}))
    assert "global 'TABLE' used by Huge.__call__, a tensor, float32 [140000]" in str(raised.value)
    assert server.paths == ["/v1/models", "/server_info"]


@pytest.mark.parametrize("limit", [2 << 20, None])
def test_long_string_is_sent_where_it_may_be(limit: int | None, call: AnyClient) -> None:
    server = LimitedServer(limit)
    call(server, *[("generate", "Hi", {"processor": Huge})] * 2)
    assert server.paths == ["/v1/models", "/server_info", "/generate", "/generate"]


def test_short_strings_are_not_asked_about(call: AnyClient) -> None:
    server = LimitedServer(1)
    call(server, ("generate", "Hi", {"processor": "min_p"}))
    assert server.paths == ["/v1/models", "/generate"]
