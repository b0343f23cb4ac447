"""Parsing of responses into records and exceptions."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from logitship.client import errors
from logitship.client.http.responses import (
    parse_error,
    parse_generate,
    parse_models,
    parse_openai,
    parse_registered,
    read_response,
)
from logitship.client.records import FinishReason, Generation, Model, Receipt, TokenLogprob, Usage

RECEIPT = {"digest": "sha256:00", "name": "P", "steps": 3, "milliseconds": 1.5}


def sglang(text: str = "Hello", **meta: Any) -> dict[str, Any]:
    meta_info = {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 1,
    }
    return {"text": text, "output_ids": [5, 6, 2], "meta_info": meta_info | meta}


def one(generation: Generation | list[Generation]) -> Generation:
    assert isinstance(generation, Generation)
    return generation


def test_parse_generate() -> None:
    data = sglang(receipts=[RECEIPT])
    assert parse_generate(data, many=False) == Generation(
        text="Hello",
        output_ids=(5, 6, 2),
        finish_reason=FinishReason("stop", 2),
        usage=Usage(4, 3, 1),
        receipts=(Receipt("sha256:00", "P", 3, 1.5),),
        rid="r1",
        raw=data,
    )


def test_generate_list_keeps_order() -> None:
    generations = parse_generate([sglang("a"), sglang("b")], many=True)
    assert isinstance(generations, list)
    assert [(each.index, each.text) for each in generations] == [(0, "a"), (1, "b")]


def test_many_always_returns_list() -> None:
    for data in (sglang(), [sglang()]):
        generations = parse_generate(data, many=True)
        assert isinstance(generations, list)
        assert len(generations) == 1


def test_sglang_logprobs() -> None:
    generation = one(
        parse_generate(
            sglang(
                input_token_logprobs=[[None, 1, None], [-2.0, 7, None]],
                output_token_logprobs=[[-0.5, 5, "He"], [-1.0, 6, "llo"]],
                output_top_logprobs=[[[-0.5, 5, "He"], [-3.0, 9, "Ha"]], None],
                input_token_ids_logprobs=[None, [[-4.0, 8, None]]],
            ),
            many=False,
        )
    )
    assert generation.prompt_logprobs == (
        TokenLogprob(None, 1),
        TokenLogprob(-2.0, 7, requested=(TokenLogprob(-4.0, 8),)),
    )
    assert generation.logprobs == (
        TokenLogprob(-0.5, 5, "He", (TokenLogprob(-0.5, 5, "He"), TokenLogprob(-3.0, 9, "Ha"))),
        TokenLogprob(-1.0, 6, "llo"),
    )


def test_abort_raises_with_partial_response() -> None:
    reason = {
        "type": "abort",
        "message": "boom",
        "status_code": 500,
        "err_type": "ProcessorFault",
        "traceback": "Trace",
    }
    with pytest.raises(errors.GenerationError, match="boom") as caught:
        parse_generate([sglang("a"), sglang("b", finish_reason=reason)], many=True)
    assert (caught.value.type, caught.value.traceback) == ("ProcessorFault", "Trace")
    assert [each.text for each in caught.value.partial] == ["a", "b"]


def test_cancelled_request_raises() -> None:
    with pytest.raises(errors.GenerationError, match="the request was cancelled") as caught:
        parse_generate(sglang(finish_reason={"type": "abort", "message": None}), many=False)
    assert caught.value.type == "AbortError"
    assert caught.value.partial.text == "Hello"


def test_parse_chat() -> None:
    data = {
        "id": "c1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi"},
                "finish_reason": "stop",
                "matched_stop": "!",
                "logprobs": {
                    "content": [{"token": "Hi", "logprob": -0.1, "top_logprobs": [{"token": "Ho", "logprob": -2.0}]}]
                },
                "receipts": [RECEIPT],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    assert parse_openai(data, many=False) == Generation(
        text="Hi",
        finish_reason=FinishReason("stop", "!"),
        usage=Usage(2, 1, 1),
        logprobs=(TokenLogprob(-0.1, token="Hi", top=(TokenLogprob(-2.0, token="Ho"),)),),
        receipts=(Receipt("sha256:00", "P", 3, 1.5),),
        rid="c1",
        raw=data,
    )


def test_completions_are_sorted_by_index() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"b": -2.0, "a": -0.1}]}
    data = {
        "choices": [
            {"index": 1, "text": "second", "finish_reason": "length"},
            {"index": 0, "text": "first", "finish_reason": "stop", "stop_reason": 7, "logprobs": logprobs},
        ]
    }
    generations = parse_openai(data, many=True)
    assert isinstance(generations, list)
    assert [each.text for each in generations] == ["first", "second"]
    assert generations[0].finish_reason == FinishReason("stop", 7)
    top = (TokenLogprob(-0.1, token="a"), TokenLogprob(-2.0, token="b"))
    assert generations[0].logprobs == (TokenLogprob(-0.1, token="a", top=top),)


def test_aborted_choice_raises() -> None:
    with pytest.raises(errors.GenerationError, match="cancelled"):
        parse_openai({"choices": [{"index": 0, "text": "a", "finish_reason": "abort"}]}, many=False)


def test_tool_calls_have_empty_text() -> None:
    data = {"choices": [{"index": 0, "message": {"content": None, "tool_calls": []}, "finish_reason": "tool_calls"}]}
    assert one(parse_openai(data, many=False)).text == ""


def test_parse_models_and_registered() -> None:
    entry = {"id": "m", "object": "model", "max_model_len": 2048}
    assert parse_models({"data": [entry, {"id": "n"}]}) == [Model("m", 2048, entry), Model("n", None, {"id": "n"})]
    registered = parse_registered({"digest": "sha256:00", "name": "P"})
    assert (registered.digest, registered.id) == ("sha256:00", None)
    assert parse_registered({"digest": "sha256:00", "id": "P@1"}).id == "P@1"


@pytest.mark.parametrize(
    "content", [b"<html>", b"[]", b"null", b"5", b'{"text": "a"}', b'{"choices": []}', b'{"data": 5}']
)
@pytest.mark.parametrize("route", ["generate", "openai", "models", "registered"])
def test_malformed_response_is_transport_error(content: bytes, route: str) -> None:
    def parse(data: Any) -> Any:
        match route:
            case "generate":
                return parse_generate(data, many=False)
            case "openai":
                return parse_openai(data, many=False)
            case "models":
                return parse_models(data)
            case _:
                return parse_registered(data)

    with pytest.raises(errors.TransportError, match="the server's response is"):
        read_response(content, parse)


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, errors.BadRequestError),
        (401, errors.AuthenticationError),
        (403, errors.PermissionDeniedError),
        (404, errors.NotFoundError),
        (413, errors.RequestTooLargeError),
        (422, errors.BadRequestError),
        (429, errors.ServerBusyError),
        (500, errors.InternalServerError),
        (502, errors.InternalServerError),
        (503, errors.ServerBusyError),
        (302, errors.APIStatusError),
    ],
)
def test_status_maps_to_exception_class(status: int, cls: type[errors.APIStatusError]) -> None:
    error = parse_error(status, b'{"error": {"message": "no"}}')
    assert type(error) is cls
    assert isinstance(error, errors.APIStatusError)
    assert (error.status_code, error.message, str(error)) == (status, "no", f"{status}: no")


@pytest.mark.parametrize(
    ("body", "message", "type_", "param"),
    [
        (
            {"error": {"message": "bad n", "type": "invalid_request_error", "param": "n"}},
            "bad n",
            "invalid_request_error",
            "n",
        ),
        ({"error": {"message": "bad"}}, "bad", None, None),
        ({"error": "bad"}, "bad", None, None),
        ({"error": {}}, "the server gave no reason", None, None),
        (
            {"object": "error", "message": "bad", "type": "BadRequestError", "param": None},
            "bad",
            "BadRequestError",
            None,
        ),
        ({"detail": "Not Found"}, "Not Found", None, None),
        ({"detail": [{"loc": ["body", "n"], "msg": "too small"}]}, "body.n: too small", None, "n"),
        ({"detail": []}, "", None, None),
        ({"detail": ["Not authenticated"]}, "Not authenticated", None, None),
        ({"detail": [{"loc": None, "msg": "too small"}, {"msg": None}]}, "too small; None", None, None),
        ({"detail": [{"loc": "n"}]}, "n: ", None, "n"),
        ({"error": {"type": {"code": 5}, "param": ["n"]}}, "the server gave no reason", "{'code': 5}", "['n']"),
        ({"strange": 1}, "the server answered {'strange': 1}", None, None),
        ([1], "the server answered [1]", None, None),
    ],
)
def test_error_body_formats(body: Any, message: str, type_: str | None, param: str | None) -> None:
    error = parse_error(400, orjson.dumps(body))
    assert isinstance(error, errors.BadRequestError)
    assert (error.message, error.type, error.param, error.body) == (message, type_, param, body)


def test_error_body_not_json() -> None:
    error = parse_error(502, b"Bad Gateway \xff")
    assert isinstance(error, errors.InternalServerError)
    assert error.body == "Bad Gateway \ufffd"


def test_processor_fault_is_generation_error() -> None:
    body = {"error": {"message": "boom", "type": "ProcessorFault", "traceback": "Traceback …"}}
    error = parse_error(500, orjson.dumps(body))
    assert isinstance(error, errors.GenerationError)
    assert (error.message, error.traceback) == ("boom", "Traceback …")
