"""Invalid requests: each is refused with a 4xx that names the field, and the server keeps running."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.answers import error_of

SHIPPING_IS_OFF = (
    "The server is not configured to enable custom logit processor. "
    "Please set `--enable-custom-logit-processor` to enable this feature."
)
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    GENERATE: {"text": "a", "sampling_params": {"max_new_tokens": 4}},
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}


@dataclass(frozen=True)
class Case:
    """Case: `change` is merged into a valid body of `path`; `param` is the field that the response must name."""

    path: str
    change: Any
    param: str
    status: int = 400
    says: str = ""

    def __str__(self) -> str:
        return f"{self.path} {str(self.change)[:60]}"


def _sampling(param: str, value: Any, says: str = "", **others: Any) -> Iterator[Case]:
    """Cases for an invalid sampling parameter with the same name on all routes."""
    yield Case(GENERATE, {"sampling_params": {param: value, **others}}, f"sampling_params.{param}", says=says)
    for path in (COMPLETIONS, CHAT):
        yield Case(path, {param: value, **others}, param, says=says)


def _everywhere(param: str, value: Any, status: int = 400, says: str = "") -> Iterator[Case]:
    for path in GOOD:
        yield Case(path, {param: value}, param, status, says)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _cases() -> Iterator[Case]:
    # unknown fields, and known ones that this server does not support
    yield from _everywhere("temprature", 1, says="unknown field")
    yield from _sampling("temperatur", 1, says="did you mean temperature?")
    yield from _everywhere("lora_path", "x", says="lora_path: is not supported")
    yield Case(
        GENERATE, {"sampling_params": {"beam_width": "x"}}, "sampling_params.beam_width", says="beam_width: is not supp"
    )
    for param in ("image_data", "session_params", "return_hidden_states", "input_embeds"):
        yield Case(GENERATE, {param: "x"}, param, says=f"{param}: is not supported")
    yield Case(COMPLETIONS, {"suffix": "x"}, "suffix", says="not supported")
    for path in (COMPLETIONS, CHAT):
        yield Case(path, {"n": 3, "best_of": 2}, "best_of", says="not be smaller than n, which is 3")
        yield Case(path, {"best_of": 2, "stream": True}, "best_of", says="with stream")
        yield Case(path, {"best_of": 0}, "best_of", says="1 or greater")
        yield Case(path, {"best_of": 1.0}, "best_of", says="1 or greater")
        yield Case(path, {"best_of": 1000}, "best_of", says="at most")
    yield Case(GENERATE, {"best_of": 2}, "best_of", says="unknown field")
    yield Case(GENERATE, {"sampling_params": {"best_of": 2}}, "sampling_params.best_of", says="unknown field")
    for param, value in {
        "functions": [{}],
        "modalities": ["audio"],
        "audio": {},
        "chat_template": "x",
    }.items():
        yield Case(CHAT, {param: value}, param, says=f"{param}: is not supported")
    # wrong types; nothing is converted
    for value in ("5", True, [1], {}):
        yield from _sampling("temperature", value, says="must be a number")
    for value in ("5", True, 1.5, 5.0, [5]):
        yield from _sampling("top_k", value, says="must be an integer")
    yield Case(GENERATE, {"sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens")
    yield from (Case(path, {"max_tokens": True}, "max_tokens") for path in (COMPLETIONS, CHAT))
    yield from _everywhere("stream", 1, says="must be true or false")
    yield from _sampling("stop", 5, says="string")
    yield from _sampling("stop", ["a", None], says="string")
    yield from _sampling("stop", "", says="empty")
    yield from _sampling("stop_regex", 5, says="string")
    yield from _sampling("stop_regex", "", says="empty")
    yield from _sampling("stop_regex", ["a+", "(b"], says="'(b': not a regular expression: missing )")
    yield from _sampling("stop_regex", "(?=a)", says="lookahead and lookbehind are not supported")
    yield from _sampling("stop_regex", r"(a)\1", says="references to groups are not supported")
    yield from _sampling("stop_regex", "a.{500}", says="more than 500 characters and operators")
    yield from _sampling("stop_token_ids", [1.0], says="token ids")
    yield from _sampling("stop_token_ids", 5, says="token ids")
    yield from _sampling("bad_words", "no", says="list")
    yield from _sampling("bad_words", [" "], says="only white space")
    yield from _sampling("logit_bias", {"a": 1}, says="'a' is not a token id")
    yield from _sampling("logit_bias", {"1": 1, "01": 2}, says="'01' is not a token id")
    yield from _sampling("logit_bias", {"9" * 5000: 1}, says="is not a token id")
    yield from _sampling("logit_bias", {"1": "2"}, says="not a number")
    yield from _sampling("logit_bias", [1])
    yield from _sampling("custom_params", [1])
    yield from _sampling("logprobs_mode", "cooked")
    yield Case(GENERATE, {"sampling_params": 5}, "sampling_params")
    yield Case(GENERATE, {"text": 5}, "text")
    yield Case(GENERATE, {"text": ["a", 5]}, "text")
    yield Case(GENERATE, {"text": None, "input_ids": "abc"}, "input_ids")
    yield Case(GENERATE, {"text": None, "input_ids": [1, "2"]}, "input_ids")
    yield Case(GENERATE, {"text": None, "input_ids": [[1], [True]]}, "input_ids")
    yield Case(COMPLETIONS, {"prompt": [1, [2]]}, "prompt")
    yield Case(COMPLETIONS, {"prompt": None}, "prompt", says="is missing")
    yield Case(COMPLETIONS, {"logprobs": True}, "logprobs")
    yield Case(CHAT, {"logprobs": 5}, "logprobs")
    yield Case(CHAT, {"messages": "hello"}, "messages")
    yield Case(CHAT, {"messages": ["hello"]}, "messages[0]")
    yield Case(CHAT, {"messages": [{"role": "owner", "content": "a"}]}, "messages[0].role")
    yield Case(CHAT, {"messages": [{"role": "user"}]}, "messages[0].content")
    yield Case(CHAT, {"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "messages[0].colour")
    image = {"type": "image_url", "image_url": {"url": "x"}}
    yield Case(CHAT, {"messages": [{"role": "user", "content": [image]}]}, "messages[0].content", says="image_url")
    yield Case(CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "messages", says="template")
    # numbers out of range
    for value in (-1, -0.5):
        yield from _sampling("temperature", value, says="0 (greedy) or greater")
    for param, value in (("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0)):
        yield from _sampling(param, value)
    yield from _sampling("repetition_penalty", 1e-300, says="0.01")
    yield from _sampling("logit_bias", {"1": 1e308}, says="float32")
    yield from _sampling("frequency_penalty", 3)
    for value in (0, -1):
        yield from _sampling("n", value)
    yield from _sampling("n", 10**6, says="at most")
    yield Case(GENERATE, {"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens")
    yield from (Case(path, {"max_tokens": -1}, "max_tokens") for path in (COMPLETIONS, CHAT))
    yield Case(CHAT, {"max_completion_tokens": -1}, "max_completion_tokens")
    yield Case(COMPLETIONS, {"min_tokens": 20, "max_tokens": 10}, "min_tokens", says="max_tokens")
    for seed in (1 << 64, -(1 << 63) - 1, 1.5, True, "1"):
        yield from (Case(path, {"seed": seed}, "seed", says="-2^63 to 2^64 - 1") for path in (COMPLETIONS, CHAT))
        yield Case(GENERATE, {"sampling_params": {"sampling_seed": seed}}, "sampling_params.sampling_seed")
    yield Case(COMPLETIONS, {"logprobs": -1}, "logprobs")
    yield Case(COMPLETIONS, {"logprobs": 99}, "logprobs", says="at most 20")
    yield Case(CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", says="at most 20")
    yield Case(CHAT, {"top_logprobs": 2}, "top_logprobs", says="logprobs")
    for value, says in (("x", "list of token ids"), ([[1]], "no list of prompts"), ([256], "outside the vocabulary")):
        yield Case(GENERATE, {"return_logprob": True, "token_ids_logprob": value}, "token_ids_logprob", says=says)
    yield Case(GENERATE, {"return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num", says="at most 20")
    yield Case(GENERATE, {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len")
    yield Case(GENERATE, {"return_logprob": True, "logprob_start_len": 9}, "logprob_start_len")
    # too much of it
    yield from _sampling("stop", ["x"] * 1025, says="1024")
    yield from _everywhere("custom_logit_processor", [{"name": "a"}] * 65, says="64")
    for depth in (101, 300):
        yield from _sampling("custom_params", {"a": _nested(depth)}, says="deeper than 100")
        yield from (
            Case(path, {"vllm_xargs": {"a": _nested(depth)}}, "vllm_xargs", says="deeper")
            for path in (COMPLETIONS, CHAT)
        )
    yield from _everywhere("custom_logit_processor", {"name": _nested(300)}, says="ecursion")
    part = {"type": _nested(500)}
    yield Case(CHAT, {"messages": [{"role": "user", "content": [part]}]}, "messages[0].content", says="part 0 is not")
    # the prompt and the model
    long = "x" * 100
    yield Case(GENERATE, {"text": "x" * 513}, "text", says="513 characters")
    yield Case(COMPLETIONS, {"prompt": ["a", "x" * 513]}, "prompt[1]", says="513 characters")
    yield Case(CHAT, {"messages": [{"role": "user", "content": "x" * 513}]}, "messages", says="513 characters")
    named = {"role": "user", "content": "x" * 256, "name": "x" * 257}
    yield Case(CHAT, {"messages": [named]}, "messages", says="513 characters")
    yield Case(GENERATE, {"text": long}, "text", says="100 tokens")
    yield Case(COMPLETIONS, {"prompt": long}, "prompt", says="100 tokens")
    yield Case(COMPLETIONS, {"prompt": ["a", long]}, "prompt[1]", says="100 tokens")
    yield Case(CHAT, {"messages": [{"role": "user", "content": long}]}, "messages")
    yield Case(COMPLETIONS, {"max_tokens": 64}, "max_tokens", says="ask for at most 63")
    yield Case(CHAT, {"max_completion_tokens": 64}, "max_completion_tokens", says="ask for at most")
    for bad in (-1, 256, 1 << 40):
        yield Case(GENERATE, {"text": None, "input_ids": [1, bad]}, "input_ids", says="vocabulary")
        yield Case(COMPLETIONS, {"prompt": [1, bad]}, "prompt", says="vocabulary")
        yield from _sampling("stop_token_ids", [bad], says="vocabulary")
        yield from _sampling("allowed_token_ids", [bad], says="vocabulary")
    yield from _sampling("logit_bias", {"256": 1}, says="vocabulary")
    yield from _sampling("allowed_token_ids", [], says="empty")
    # empty
    yield Case(GENERATE, {"text": None}, "text", says="either text or input_ids")
    yield Case(GENERATE, {"input_ids": [1]}, "text", says="either text or input_ids")
    yield Case(GENERATE, {"text": ""}, "text", says="empty")
    yield Case(GENERATE, {"text": []}, "text", says="empty")
    yield Case(GENERATE, {"text": ["a", ""]}, "text[1]", says="empty")
    yield Case(GENERATE, {"text": None, "input_ids": []}, "input_ids", says="empty")
    yield Case(GENERATE, {"text": None, "input_ids": [[1], []]}, "input_ids[1]", says="empty")
    yield Case(COMPLETIONS, {"prompt": []}, "prompt", says="empty")
    yield Case(COMPLETIONS, {"prompt": ""}, "prompt", says="empty")
    yield Case(COMPLETIONS, {"prompt": ["", "a"]}, "prompt[0]", says="empty")
    yield Case(CHAT, {"messages": []}, "messages", says="empty")
    yield Case(COMPLETIONS, {"request_id": ""}, "request_id", says="empty")
    yield Case(GENERATE, {"rid": ""}, "rid", says="empty")
    yield Case(GENERATE, {"text": ["a", "b"], "rid": ["a", ""]}, "rid", says="empty")
    # lists of unequal length
    two = {"text": ["a", "b"]}
    for param, value in {
        "sampling_params": [{}],
        "rid": ["a"],
        "return_logprob": [True],
        "logprob_start_len": [0, 0, 0],
        "top_logprobs_num": [1],
        "custom_logit_processor": [None],
    }.items():
        yield Case(GENERATE, {**two, param: value}, param, says="for 2 prompts")
    yield Case(GENERATE, {"sampling_params": [{}]}, "sampling_params", says="list of prompts")
    yield Case(GENERATE, {**two, "rid": ["a", "a"]}, "rid", says="different")
    yield Case(GENERATE, {**two, "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", says="n must be")
    yield Case(GENERATE, {**two, "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p")
    yield Case(COMPLETIONS, {"prompt": ["a", "b"], "custom_logit_processor": [None]}, "custom_logit_processor")
    yield Case(GENERATE, {"text": ["a"] * 200}, "text", says="at most")
    # fields that contradict each other
    yield Case(COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", says="stream")
    yield Case(COMPLETIONS, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage")
    yield Case(COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", says="stream")
    yield Case(CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens")
    yield Case(CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message")
    yield Case(CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", says="'chat_template'")
    yield Case(CHAT, {"model": "gpt-4"}, "model", 404, "'gpt-4' does not exist")
    yield Case(COMPLETIONS, {"model": "gpt-4"}, "model", 404)
    # the processor
    processor = "custom_logit_processor"
    yield from _everywhere(processor, "not JSON", says="not JSON")
    yield from _everywhere(processor, "[1]", says="not a JSON object")
    yield from _everywhere(processor, 5, says="must be a processor string")
    yield from _everywhere(processor, {}, says="none of the keys")
    yield from _everywhere(processor, '{"callable": "xyz"}', says="hexadecimal")
    yield from _everywhere(processor, {"callable": ""}, says="empty")
    yield from _everywhere(processor, {"callable": b"no pickle".hex()}, says="cannot be unpickled")
    yield from _everywhere(processor, {"source": "x"}, says="class_name")
    yield from _everywhere(processor, {"digest": "sha256:1"}, says="64 hexadecimal")
    yield from _everywhere(processor, {"callable": "00" * 4096}, 413, "at most 4096")
    yield from _sampling("custom_params", {"__req__": 1}, says="__req__")
    for path in GOOD:
        yield Case(path, {processor: [{"name": "a"}, "x"]}, f"{processor}[1]", says="not JSON")


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_refusal_names_the_field(case: Case, shipping_client: Any, shipping_engine: Any) -> None:
    error = error_of(shipping_client.post(case.path, {**GOOD[case.path], **case.change}), case.status)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == case.param
    assert case.param.split(".")[-1].split("[")[0] in error["message"]
    assert case.says in error["message"]
    assert shipping_engine.closed == [request.rid for request in shipping_engine.requests]
    shipping_client.ok(case.path, GOOD[case.path])


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"text": NaN}', b'{"a": Infinity}', b'{"a": 1e999}', b"\xff", b"[" * 500, b'{"a": 1} x']
)
def test_malformed_json(path: str, body: bytes, client: Any) -> None:
    error = error_of(client.http.post(path, content=body))
    assert error["message"].startswith("the request body is not JSON: ")
    assert "line 1 column" in error["message"]
    assert error["type"] == "invalid_request_error"
    client.ok(path, GOOD[path])


@pytest.mark.parametrize("path", GOOD)
def test_nesting(path: str, client: Any) -> None:
    error = error_of(client.http.post(path, content=b"[" * 5000))
    assert error["message"] == "the request body is nested deeper than 512 levels"
    client.ok(path, GOOD[path])


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("body", ["5", "[]", '"a"', "null"])
def test_body_is_not_an_object(path: str, body: str, client: Any) -> None:
    assert error_of(client.http.post(path, content=body))["message"] == "the request body: must be a JSON object"


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "processor", [{"callable": "80"}, {"source": "x", "class_name": "X"}, {"digest": "sha256:" + "a" * 64}]
)
def test_shipped_code_requires_the_flag(path: str, processor: dict[str, str], client: Any, engine: Any) -> None:
    error = error_of(client.post(path, {**GOOD[path], "custom_logit_processor": processor}))
    assert error["message"] == SHIPPING_IS_OFF
    assert error["param"] == "custom_logit_processor"
    assert not engine.requests
    client.ok(path, {**GOOD[path], "custom_logit_processor": {"name": "installed"}})


@pytest.mark.parametrize("path", GOOD)
def test_body_over_the_limit(path: str, client: Any) -> None:
    big = b'{"text": "' + b"x" * (1 << 16) + b'"}'
    declared = client.http.post(path, content=big)
    chunked = client.http.post(path, content=iter([big[:1000], big[1000:]]))
    for answer in (declared, chunked):
        assert answer.status_code == 413
        assert "more than 65536 bytes" in answer.json()["error"]["message"]
    client.ok(path, GOOD[path])
