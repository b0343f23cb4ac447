"""Disconnects and internal errors, at the level of ASGI messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from logitship.server.http.app import create_app
from logitship.server.requests.messages import GenerationChunk, GenerationRequest
from tests.helpers.answers import error_of


class Caller:
    """Sends one request to the app, and disconnects on demand."""

    def __init__(self, path: str, body: Any) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        self._body: bytes | None = orjson.dumps(body)
        self.gone = asyncio.Event()
        self.sent: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "rid": "r"}),
        ("/v1/completions", {"prompt": "a", "rid": "r"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "rid": "r"}),
    ],
)
async def test_disconnect_cancels_the_request(path: str, body: dict[str, Any], stream: bool, engine: Any) -> None:
    engine.hangs = True
    caller = Caller(path, {**body, "stream": stream})
    call = asyncio.ensure_future(create_app(engine)(caller.scope, caller.receive, caller.send))
    await asyncio.wait_for(asyncio.to_thread(engine.hung.wait, 30), 30)
    assert not engine.closed
    caller.gone.set()
    await asyncio.wait_for(call, 30)
    assert set(engine.closed) == {"r"}


async def test_disconnect_cancels_the_whole_batch(engine: Any) -> None:
    engine.hangs = True
    caller = Caller("/generate", {"text": ["a", "b", "c"], "rid": "r", "stream": True})
    call = asyncio.ensure_future(create_app(engine)(caller.scope, caller.receive, caller.send))
    await asyncio.to_thread(engine.hung.wait, 30)
    caller.gone.set()
    await asyncio.wait_for(call, 30)
    assert set(engine.closed) == {"r_0", "r_1", "r_2"}


async def test_disconnect_before_the_stream(engine: Any) -> None:
    engine.hangs = True
    caller = Caller("/generate", {"text": "a", "rid": "r", "stream": True})
    caller.gone.set()
    await asyncio.wait_for(create_app(engine)(caller.scope, caller.receive, caller.send), 30)
    assert engine.closed == [request.rid for request in engine.requests]
    assert [message["status"] for message in caller.sent if "status" in message] == [499]


async def test_send_failure(engine: Any) -> None:
    caller = Caller("/generate", {"text": "a", "rid": "r", "stream": True})

    async def broken_pipe(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    with pytest.raises(OSError, match="broken pipe"):
        await create_app(engine)(caller.scope, caller.receive, broken_pipe)
    assert set(engine.closed) == {"r"}


def test_unexpected_error_before_the_response(client: Any, engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> list[Any]:
        raise ZeroDivisionError("a secret")

    script, engine.script = engine.script, broken
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/generate", {"text": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        answer = client.post(path, body)
        assert error_of(answer, 500)["message"] == "internal server error"
        assert "secret" not in answer.text
    records = [record for record in caplog.records if record.exc_info]
    assert [record.message for record in records] == ["POST /generate failed"] * 2 + ["POST /v1/completions failed"]
    engine.script = script
    client.ok("/generate", {"text": "a"})


def test_unexpected_error_in_a_stream(client: Any, engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    script = engine.script

    def breaks_off(request: Any) -> Any:
        yield script(request)[0]
        raise ZeroDivisionError("a secret")

    engine.script = breaks_off
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
        first, last = client.events(path, body)
        assert "error" not in first
        assert last["error"]["message"] == "internal server error"
    assert caplog.text.count("ZeroDivisionError: a secret") == 2


def test_stream_interval(client: Any, engine: Any, text_script: Any) -> None:
    engine.script = text_script("Hello there")  # 12 tokens with the end
    body = {"prompt": ["a", "b"], "stream_interval": 4, "return_token_ids": True, "logprobs": 0}
    events = [event["choices"][0] for event in client.events("/v1/completions", body)]
    for index in (0, 1):
        texts = [choice["text"] for choice in events if choice["index"] == index]
        assert texts == ["H", "ello", " the", "re"]
        lengths = [len(choice["token_ids"]) for choice in events if choice["index"] == index]
        assert lengths == [1, 4, 4, 3]
        assert lengths == [len(choice["logprobs"]["tokens"]) for choice in events if choice["index"] == index]
    params = [{"stream_interval": 100}, {}]
    events = client.events("/generate", {"text": ["a", "b"], "sampling_params": params})
    assert [event["text"] for event in events if event["index"] == 0] == ["H", "Hello there"]
    assert len([event for event in events if event["index"] == 1]) == 12
    assert client.post("/v1/completions", {**body, "stream_interval": 0}).json()["error"]["param"] == "stream_interval"


def test_tokens_before_a_fault_are_sent(client: Any, engine: Any, text_script: Any, failing: Any) -> None:
    def fails_at_the_end(request: GenerationRequest) -> list[GenerationChunk]:
        chunks = text_script("Hello")(request)
        end = chunks[-request.num_sequences]
        fault = replace(end, text="", token_ids=[], finish_reason=failing(request)[-1].finish_reason)
        return [*chunks[: -request.num_sequences], fault]

    engine.script = fails_at_the_end
    body = {"prompt": "a", "n": 2, "stream_interval": 100, "return_token_ids": True}
    *events, fault = client.events("/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "H"), (1, "H"), (0, "ello"), (1, "ello")]
    assert [choice["token_ids"] for choice in choices[2:]] == [list(b"ello")] * 2
    assert [choice["finish_reason"] for choice in choices] == [None] * 4
    assert fault["error"]["type"] == "ProcessorFault"
