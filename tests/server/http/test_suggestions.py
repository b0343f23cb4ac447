"""Suggestions in refusals of unknown fields and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from logitship.server.refusals import BadRequest
from logitship.server.schemas.field_rules import Refused
from logitship.server.schemas.openai_schemas import ChatCompletionRequest, CompletionRequest
from logitship.server.schemas.request_schema import RequestModel, parse_model
from logitship.server.schemas.responses_schemas import ResponsesRequest
from logitship.server.schemas.sglang_schemas import GenerateRequest, SGLangSamplingParams
from logitship.server.schemas.tokenize_schemas import TokenizeRequest

MODELS: list[type[RequestModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    ResponsesRequest,
    SGLangSamplingParams,
    TokenizeRequest,
]
MESSAGES = [{"role": "user", "content": "a"}]


def _refusal(model: type[RequestModel], name: str) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_model(model, {name: 1})
    return str(caught.value.message)


def _misspelled() -> Iterator[tuple[type[RequestModel], str, str]]:
    for model in MODELS:
        known = {field.alias or name for name, field in model.model_fields.items()}
        for name, rule in model.rules.items():
            if isinstance(rule, Refused):
                for typo in {name[:-1], f"{name}s", f"{name[0]}{name}"} - known - model.rules.keys():
                    yield model, name, typo


def test_no_refused_field_is_suggested() -> None:
    cases = list(_misspelled())
    assert len(cases) > 100
    for model, name, typo in cases:
        assert not _refusal(model, typo).endswith(f" {name}?")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/generate", {"text": "a", "max_new_tokens": 4}, "max_new_tokens", "it belongs in sampling_params"),
        ("/generate", {"text": "a", "json_schema": "{}"}, "json_schema", "it belongs in sampling_params"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"return_logprob": True}},
            "sampling_params.return_logprob",
            "it belongs next to sampling_params, not in it",
        ),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "enable_thinking": False},
            "enable_thinking",
            "it belongs in chat_template_kwargs",
        ),
        ("/v1/responses", {"input": "a", "enable_thinking": False}, "enable_thinking", "in chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "enable_thinking": False}, "enable_thinking", "in chat_template_kwargs"),
        (
            "/v1/completions",
            {"prompt": "a", "bad_words": ["x", "\n"]},
            "bad_words",
            r'"\n" is only white space, which is no word: forbid its tokens with logit_bias',
        ),
        ("/v1/completions", {"prompt": "a", "bad_words": [""]}, "bad_words", "must not contain an empty string"),
    ],
)
def test_refusals_say_what_to_do(client: Any, path: str, body: dict[str, Any], param: str, says: str) -> None:
    answer = client.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert says in error["message"]
