"""Translation of requests for vLLM."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson
import pytest

from logitship.client.http import http_requests as requests
from logitship.client.http.http_requests import HttpRequest
from logitship.client.http.request_options import ChatOptions, CompletionOptions, GenerateOptions
from logitship.client.http.vllm_requests import has_processors, translate_for_vllm

SHIPPED = '{"callable": "80"}'
OTHER = '{"source": "x", "class_name": "X"}'
DIGEST = "sha256:" + "0" * 64
MESSAGES = [{"role": "user", "content": "Hi"}]


def generate(prompt: Any = "Hi", n: int | None = None, stream: bool = False, **options: Any) -> HttpRequest:
    return requests.generate(prompt, n, cast(GenerateOptions, options), stream=stream)


def completions(prompt: Any = "Hi", **options: Any) -> HttpRequest:
    return requests.completions(prompt, None, cast(CompletionOptions, options), stream=False)


def chat(**options: Any) -> HttpRequest:
    return requests.chat(MESSAGES, None, cast(ChatOptions, options), stream=False)


def xargs_of(request: HttpRequest) -> dict[str, Any]:
    xargs: dict[str, Any] = translate_for_vllm(request).json["vllm_xargs"]
    return xargs


def test_generate_becomes_completion() -> None:
    request = translate_for_vllm(generate(n=2, max_new_tokens=5, min_new_tokens=1, seed=3, temperature=0.5, rid="r1"))
    assert (request.method, request.path, request.stream) == ("POST", "/v1/completions", False)
    assert request.json == {
        "prompt": "Hi",
        "stream": False,
        "return_token_ids": True,
        "max_tokens": 5,
        "min_tokens": 1,
        "seed": 3,
        "temperature": 0.5,
        "n": 2,
        "request_id": "r1",
    }


def test_generate_stream() -> None:
    request = translate_for_vllm(generate([1, 2], stream=True))
    assert request.stream
    assert request.json == {
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"no_stop_trim": True}, "include_stop_str_in_output", True),
        ({"json_schema": "{}"}, "structured_outputs", {"json": "{}"}),
        (
            {"json_schema": "{}", "whitespace_pattern": ""},
            "structured_outputs",
            {"json": "{}", "whitespace_pattern": ""},
        ),
        ({"regex": "a+"}, "structured_outputs", {"regex": "a+"}),
        ({"ebnf": "root ::= a"}, "structured_outputs", {"grammar": "root ::= a"}),
        ({"structural_tag": "{}"}, "structured_outputs", {"structural_tag": "{}"}),
        ({"max_thinking_tokens": 4}, "thinking_token_budget", 4),
        ({"thinking_token_budget": 4}, "thinking_token_budget", 4),
        ({"return_logprob": True}, "logprobs", 0),
        ({"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": -1}, "logprobs", 3),
        ({"logit_bias": {5: 1.0}}, "logit_bias", {"5": 1.0}),
        ({"extra_body": {"priority": 3}}, "priority", 3),
    ],
)
def test_generate_fields_use_vllm_names(options: dict[str, Any], field: str, value: Any) -> None:
    body = translate_for_vllm(generate(**options)).json
    assert body.pop(field) == value
    assert body == {"prompt": "Hi", "stream": False, "return_token_ids": True}


def test_logprobs_not_requested() -> None:
    assert "logprobs" not in translate_for_vllm(generate(return_logprob=False, top_logprobs_num=3)).json


@pytest.mark.parametrize(
    ("processor", "string"),
    [(DIGEST, {"digest": DIGEST}), ({"digest": DIGEST}, {"digest": DIGEST}), ("Lipogram@2", {"name": "Lipogram@2"})],
)
def test_registered_processors_are_named(processor: Any, string: dict[str, str]) -> None:
    body = translate_for_vllm(chat(processor=processor)).json
    assert orjson.loads(body["vllm_xargs"]["custom_logit_processor"]) == string


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (generate(stop_regex="a"), "stop_regex: vLLM does not support stop expressions"),
        (generate(return_logprob=True, token_ids_logprob=[5]), "token_ids_logprob: vLLM returns no log-probabilities"),
        (generate(trace={"top": 3}), "trace: vLLM does not support traces"),
        (generate(logprobs_mode="raw_logprobs"), "logprobs_mode: on vLLM only the operator can set this"),
        (completions(logprobs_mode="raw_logprobs"), "logprobs_mode: on vLLM only the operator can set this"),
        (
            generate(return_logprob=True, logprob_start_len=0),
            "logprob_start_len: vLLM only returns log-probabilities of the output",
        ),
        (generate(["a", "b"], rid=["1", "2"]), "rid: on vLLM a batch is one request"),
        (generate(["a", "b"], params=[{}, {}]), "params: on vLLM all prompts of a batch share them"),
        (generate(["a", "b"], processor=[SHIPPED, None]), "processor: on vLLM all prompts of a batch"),
        (completions(["a", "b"], processor=[SHIPPED, None]), "processor: on vLLM all prompts of a batch"),
        (generate(["a"], logits_processors=[[{"processor": SHIPPED}]]), "logits_processors: on vLLM all prompts"),
        (
            chat(processor=SHIPPED, vllm_xargs={"custom_logit_processor": SHIPPED}),
            "vllm_xargs: custom_logit_processor is also given by a separate argument",
        ),
        (
            completions(processor=SHIPPED, extra_body={"use_beam_search": True}),
            "use_beam_search: vLLM's beam search does not call processors",
        ),
        (
            chat(vllm_xargs={"custom_logit_processor": SHIPPED}, extra_body={"use_beam_search": True}),
            "use_beam_search: vLLM's beam search does not call processors",
        ),
        (
            generate(extra_body={"sampling_params": {"beam_width": 2}}),
            "beam_width: vLLM does not have this sampling parameter",
        ),
    ],
)
def test_unsupported_options_are_refused(request_: HttpRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translate_for_vllm(request_)


@pytest.mark.parametrize("build", [generate, completions, chat])
def test_processor_is_sent_in_vllm_xargs(build: Any) -> None:
    request = build(processor=SHIPPED, params={"bias": [1, {"a": None}]}, vllm_xargs={"whitelist": [1]})
    translated = translate_for_vllm(request)
    xargs = translated.json["vllm_xargs"]
    assert json.loads(xargs.pop("custom_params")) == {"bias": [1, {"a": None}]}
    assert xargs == {"custom_logit_processor": SHIPPED, "whitelist": [1]}
    assert {"custom_logit_processor", "custom_params", "logits_processors"}.isdisjoint(translated.json)


def test_beam_search_without_processor() -> None:
    assert translate_for_vllm(completions(extra_body={"use_beam_search": True})).json["use_beam_search"]


def test_empty_list_of_prompts_is_left_to_the_server() -> None:
    assert translate_for_vllm(completions(extra_body={"prompt": []})).json["prompt"] == []


def test_one_processor_for_batch() -> None:
    assert xargs_of(completions(["a", "b"], processor=SHIPPED)) == {"custom_logit_processor": SHIPPED}


def test_installed_processor_by_name() -> None:
    assert xargs_of(chat(processor="min_p")) == {"custom_logit_processor": '{"name":"min_p"}'}


def test_several_processors_with_same_params() -> None:
    xargs = xargs_of(generate(processor=[SHIPPED, OTHER], params={"a": 1}))
    assert json.loads(xargs.pop("logits_processors")) == [{"processor": SHIPPED}, {"processor": OTHER}]
    assert xargs == {"custom_params": '{"a":1}'}


def test_several_processors_with_own_params() -> None:
    entries = [{"processor": SHIPPED, "params": {"a": 1}}, {"processor": OTHER}]
    for prompt in ("Hi", ["a", "b"]):
        xargs = xargs_of(completions(prompt, logits_processors=entries))
        assert json.loads(xargs.pop("logits_processors")) == entries
        assert xargs == {}


def test_request_without_processors_is_unchanged() -> None:
    for request in (chat(max_tokens=3, vllm_xargs={"other": 1}), completions(temperature=0)):
        assert translate_for_vllm(request) == request
        assert translate_for_vllm(request).json is not request.json


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (generate(), False),
        (generate(max_new_tokens=3, vllm_xargs={"other": 1}), False),
        (requests.get("/v1/models"), False),
        (generate(processor=SHIPPED), True),
        (generate(params={"a": 1}), True),
        (generate(["a", "b"], params=[None, {"a": 1}]), True),
        (chat(params={"a": 1}), True),
        (chat(logits_processors=[{"processor": SHIPPED}]), True),
        (chat(vllm_xargs={"custom_logit_processor": SHIPPED}), True),
    ],
)
def test_has_processors(request_: HttpRequest, expected: bool) -> None:
    assert has_processors(request_) is expected
