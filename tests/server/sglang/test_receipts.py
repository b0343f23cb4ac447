"""Receipts in SGLang's front end, on fakes: from the scheduler's message to `meta_info` and the HTTP response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.server.runtime.response_receipts import response_receipts
from logitship.server.schemas.response_schemas import ReceiptObject
from logitship.server.sglang import hooks


def receipts(steps: int) -> list[ReceiptObject]:
    return [{"digest": "sha256:0", "name": "Counts", "steps": steps, "milliseconds": 0.5, "forced_steps": 0}]


def test_meta_info_has_the_receipts_of_finished_requests() -> None:
    """SGLang gets the other keys alone: in a stream, it would split the list among the chunks."""

    def update(manager: Any, meta_info: Any, state: Any, info: dict[str, list[Any]], index: int, reason: Any) -> None:
        meta_info.update({key: values[index] for key, values in info.items()})

    found: list[dict[str, Any]] = [{}, {}, {}]
    info = {"receipts": [receipts(4), []], "other": [[1], [2]]}
    for index in (0, 1):
        hooks.keep_receipts(update, None, found[index], None, info, index, None)
    hooks.keep_receipts(update, None, found[2], None, {"other": [[3]]}, 0, None)
    assert found == [{"other": [1], "receipts": receipts(4)}, {"other": [2]}, {"other": [3]}]


PROCESSOR = {"custom_logit_processor": {"name": "disallowed_tokens"}, "custom_params": {"token_ids": [1]}}


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ([{"meta_info": {}}, {"meta_info": {"receipts": receipts(2)}}], {0: receipts(2)}),
        ([{"meta_info": {"receipts": receipts(n)}, "index": n} for n in (2, 1)], {1: receipts(1), 2: receipts(2)}),
        ([[{"meta_info": {"receipts": receipts(n)}} for n in (1, 2)]], {0: receipts(1), 1: receipts(2)}),
    ],
    ids=["one", "stream_of_several", "several"],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", PROCESSOR), ("/v1/completions", {}), ("/generate", PROCESSOR)],
    ids=["with_a_processor", "without", "in_meta_info"],
)
def test_choices_have_the_receipts_of_their_continuations(
    responses: Sequence[Any], expected: dict[int, Any], path: str, body: dict[str, Any]
) -> None:
    async def json(request: Any) -> Any:
        return dict(body)

    async def generate_request(manager: Any, obj: Any, request: Any) -> AsyncIterator[Any]:
        for response in responses:
            yield response

    async def run() -> dict[int, Any] | None:
        await hooks.keep_processor(json, SimpleNamespace(scope={"path": path}))
        passed_on = [each async for each in hooks.admit(generate_request, SimpleNamespace(), None)]
        assert passed_on == responses
        found = response_receipts()
        if found is None:
            return None
        choices: list[dict[str, Any]] = [{"index": index, "finish_reason": "stop"} for index in range(4)]
        assert found.write({"choices": choices})
        return {choice["index"]: choice["receipts"] for choice in choices if "receipts" in choice}

    are_added = body and path != "/generate"
    assert asyncio.run(run()) == (expected if are_added else None)
