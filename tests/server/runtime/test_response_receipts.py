"""Receipts in JSON and in streams, behind a server with the hooks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient

from logitship.client.sampling_record import SamplingRecord
from logitship.server.runtime.response_receipts import HTTP_RESPONSES, expect_receipts, response_receipts
from logitship.server.schemas.response_schemas import ReceiptObject


def receipt(steps: int) -> ReceiptObject:
    return {"digest": "sha256:0", "name": "Größe", "steps": steps, "milliseconds": 0.5, "forced_steps": 0}


def choice(index: int, reason: str | None = "stop") -> dict[str, Any]:
    return {"index": index, "text": "é", "finish_reason": reason}


def add(*choices: int) -> None:
    """Add the receipts of choices, in a task of its own, as engines do."""

    async def run() -> None:
        receipts = response_receipts()
        if receipts is not None:
            for index in choices:
                receipts.add(index, [receipt(index + 1)])

    asyncio.get_running_loop().create_task(run())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client of a server whose routes answer what the request says, with receipts if it has processors."""
    for base in (Response, StreamingResponse):
        monkeypatch.setattr(base, "__call__", base.__call__)
    for target in HTTP_RESPONSES:
        assert target.difference is None
        target.wrap()
    app = FastAPI()

    async def events(body: Any) -> AsyncIterator[str | bytes]:
        for event in body["events"]:
            add(*event.pop("ended", []))
            await asyncio.sleep(0)
            text = f"event: x\ndata: {json.dumps(event)}\n\n"
            yield text.encode() if body["as_bytes"] else text
        yield "data: [DONE]\n\n"

    @app.post("/")
    async def answer(body: dict[str, Any]) -> Response:
        if body.get("processors"):
            expect_receipts()
        if "events" in body:
            return StreamingResponse(events(body), media_type="text/event-stream")
        add(*body.get("ended", []))
        await asyncio.sleep(0)
        if body.get("plain"):
            return PlainTextResponse("Internal Server Error", 500)
        return JSONResponse(body["answer"])

    with TestClient(app) as client:
        yield client


CHOICES = {"object": "chat.completion", "choices": [choice(0), choice(1)]}


def with_receipts(index: int) -> dict[str, Any]:
    return {**choice(index), "receipts": [receipt(index + 1)]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CHOICES, {**CHOICES, "choices": [with_receipts(0), with_receipts(1)]}),
        ({"object": "response"}, {"object": "response", "receipts": [receipt(1), receipt(2)]}),
        ({"type": "message"}, {"type": "message", "receipts": [receipt(1), receipt(2)]}),
        ({"error": {"message": "refused"}}, {"error": {"message": "refused"}}),
        ([1], [1]),
    ],
    ids=["choices", "response", "message", "error", "list"],
)
def test_whole_answers(client: TestClient, answer: Any, expected: Any) -> None:
    body = {"answer": answer, "ended": [0, 1]}
    assert client.post("/", json={**body, "processors": True}).json() == expected
    assert client.post("/", json=body).json() == answer


def test_other_answers_are_as_they_were(client: TestClient) -> None:
    answered = client.post("/", json={"plain": True, "ended": [0], "processors": True})
    assert (answered.status_code, answered.text) == (500, "Internal Server Error")


def streamed(client: TestClient, *events: dict[str, Any], as_bytes: bool, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    text = client.post("/", json={"events": events, "as_bytes": as_bytes, **body}).text
    *parts, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    assert all(part.startswith("event: x\ndata: ") for part in parts)
    return [json.loads(part.partition("data: ")[2]) for part in parts]


@pytest.mark.parametrize("as_bytes", [True, False])
def test_events_with_the_end_of_a_choice(client: TestClient, as_bytes: bool) -> None:
    """A choice may have finished before its last event is sent, and an event may have several choices."""
    events = [
        {"choices": [choice(0, None)], "ended": [2]},
        {"choices": [choice(1, None)], "ended": [0]},
        {"choices": [choice(2)]},
        {"choices": [choice(0), choice(1)], "ended": [1]},
        {"choices": [], "usage": {}},
    ]
    plain = [{key: value for key, value in event.items() if key != "ended"} for event in events]
    assert streamed(client, *events, as_bytes=as_bytes) == plain
    plain[2], plain[3] = {"choices": [with_receipts(2)]}, {"choices": [with_receipts(0), with_receipts(1)]}
    assert streamed(client, *events, as_bytes=as_bytes, processors=True) == plain


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            {"type": "response.completed", "response": {"object": "response"}},
            {"type": "response.completed", "response": {"object": "response", "receipts": [receipt(1)]}},
        ),
        ({"type": "message_delta", "usage": {}}, {"type": "message_delta", "usage": {}, "receipts": [receipt(1)]}),
    ],
    ids=["response", "message"],
)
def test_last_events_of_other_routes(client: TestClient, last: dict[str, Any], expected: dict[str, Any]) -> None:
    first = {"type": "response.created", "response": {"object": "response"}}
    events = [first, {**last, "ended": [0]}, {"type": "message_stop"}]
    answered = streamed(client, *events, as_bytes=False, processors=True)
    assert answered == [first, expected, {"type": "message_stop"}]


def test_prompts_have_their_own_choices() -> None:
    async def run() -> list[int]:
        expect_receipts()
        receipts = response_receipts()
        assert receipts is not None
        return [receipts.reserve(each) for each in (2, 2, 1)]

    assert asyncio.run(run()) == [0, 2, 4]


def test_records_come_with_the_next_event_of_their_choice() -> None:
    copy_context().run(_write_records)


def _write_records() -> None:
    def record(start: int, *tokens: int) -> SamplingRecord:
        masks = [[token] for token in tokens]
        return replace(SamplingRecord.from_lists(50, tokens, masks, [0.0] * len(tokens)), start=start)

    expect_receipts()
    receipts = response_receipts()
    assert receipts is not None
    receipts.add_record(1, record(0, 5))
    receipts.add_record(1, record(1, 6))
    assert receipts.write_event("data: [DONE]") == "data: [DONE]"
    assert receipts.write_event(f"data: {json.dumps({'choices': [choice(0, None)]})}").count("sampling_record") == 0
    event = receipts.write_event(f"data: {json.dumps({'choices': [choice(1, None)]})}")
    assert isinstance(event, str)
    (written,) = json.loads(event.removeprefix("data: "))["choices"]
    assert SamplingRecord.from_json(written["sampling_record"]).token_ids.tolist() == [5, 6]
    assert not receipts
    receipts.add_record(1, record(2, 7))
    body = {"choices": [choice(0), choice(1)]}
    assert receipts.write(body)
    assert [each.get("sampling_record", {}).get("start") for each in body["choices"]] == [None, 2]
