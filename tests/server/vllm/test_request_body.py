from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from fastapi import HTTPException

from logitship.server.vllm.request_body import move_mask_fields, move_processors, read_json

STRING = {"name": "disallowed_tokens"}
TEXT = json.dumps(STRING, separators=(",", ":"))
SEVERAL = [{"processor": STRING, "params": {"token_ids": [1]}}]


@pytest.mark.parametrize(
    ("body", "xargs"),
    [
        ({"custom_logit_processor": TEXT, "custom_params": {"a": 1}}, {"custom_params": '{"a":1}'}),
        ({"custom_logit_processor": STRING}, {}),
        ({"vllm_xargs": {"custom_logit_processor": STRING, "other": 5}}, {"other": 5}),
        ({"vllm_xargs": {"custom_logit_processor": TEXT}, "custom_params": {}}, {"custom_params": "{}"}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/below/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_processor_is_moved(body: dict[str, Any], xargs: dict[str, Any], path: str) -> None:
    body = copy.deepcopy(body)
    for _ in range(2):
        move_processors(body, path)
        assert body == {"vllm_xargs": {**xargs, "custom_logit_processor": TEXT}}


def test_list_is_moved() -> None:
    body = {"logits_processors": SEVERAL, "model": "m", "custom_params": None}
    move_processors(body, "/v1/completions")
    assert json.loads(body.pop("vllm_xargs")["logits_processors"]) == SEVERAL  # type: ignore[index, call-overload]
    assert body == {"model": "m"}


@pytest.mark.parametrize("body", [{}, {"custom_params": {"a": 1}}, {"vllm_xargs": {"a": 1}}, {"vllm_xargs": "a"}])
def test_other_requests_stay_as_they_are(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    move_processors(body, "/v1/embeddings")
    assert body == before


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        ({"custom_logit_processor": TEXT}, "/v1/embeddings", "no processors on the route /v1/embeddings"),
        ({"vllm_xargs": {"logits_processors": "[]"}}, "/score", "logits_processors: vLLM calls no processors on"),
        ({"custom_logit_processor": TEXT, "use_beam_search": True}, "/v1/completions", "in a beam search"),
        (
            {"custom_logit_processor": TEXT, "vllm_xargs": {"custom_logit_processor": TEXT}},
            "/v1/completions",
            "give either this or vllm_xargs.custom_logit_processor",
        ),
    ],
)
def test_requests_whose_processors_would_be_dropped_are_refused(body: dict[str, Any], path: str, message: str) -> None:
    class Request:
        scope = {"path": path}  # noqa: RUF012  # a fake

    async def parse(request: Request) -> dict[str, Any]:
        return body

    with pytest.raises(HTTPException, match=message) as refused:
        asyncio.run(read_json(parse, Request()))
    assert refused.value.status_code == 400


PACKED = {"return_sampling_mask": True, "sampling_mask_format": "packed"}
MOVED = {"return_sampling_mask": 1, "sampling_mask_format": "packed"}  # vLLM takes no booleans there


@pytest.mark.parametrize(
    ("body", "xargs"),
    [
        (PACKED, MOVED),
        (PACKED | {"return_sampling_edits": True}, MOVED | {"return_sampling_edits": 1}),
        (PACKED | {"return_sampling_edits": False}, MOVED),
        ({"vllm_xargs": MOVED, "return_sampling_edits": True}, MOVED | {"return_sampling_edits": 1}),
    ],
)
def test_mask_fields_are_moved(body: dict[str, Any], xargs: dict[str, Any]) -> None:
    body = copy.deepcopy(body)
    for _ in range(2):
        assert move_mask_fields(body, "/v1/chat/completions")
        assert body == {"vllm_xargs": xargs}


@pytest.mark.parametrize("body", [{}, {"return_sampling_mask": False}, {"vllm_xargs": {"a": 1}}])
def test_requests_without_masks(body: dict[str, Any]) -> None:
    body = copy.deepcopy(body)
    expected = body.get("vllm_xargs")
    assert not move_mask_fields(body, "/v1/embeddings")
    assert body.get("vllm_xargs") in (expected, {})


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (PACKED, "/v1/responses", "only /v1/completions and /v1/chat/completions return masks"),
        (PACKED | {"use_beam_search": True}, "/v1/completions", "not supported with beam search"),
        (PACKED | {"vllm_xargs": MOVED}, "/v1/completions", "give either this or vllm_xargs."),
        ({"return_sampling_mask": True}, "/v1/completions", "sampling_mask_format: must be packed"),
        ({"return_sampling_mask": "x"}, "/v1/completions", "return_sampling_mask: must be true or false"),
        ({"return_sampling_edits": True}, "/v1/completions", "return_sampling_edits: requires return_sampling_mask"),
        (PACKED | {"return_sampling_edits": 3}, "/v1/completions", "return_sampling_edits: must be true or false"),
        (PACKED | {"sampling_mask_format": "zip"}, "/v1/completions", "must be lists or packed"),
    ],
)
def test_masks_that_would_be_dropped_are_refused(body: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        move_mask_fields(copy.deepcopy(body), path)
