from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams
from tests.helpers.offline import GREEDY, quiet


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, InvalidRequest, r"prompts\[1\]: is empty"),
        ([5] * 600, None, InvalidRequest, r"prompts\[1\]: has 600 tokens"),
        ([5, 999], None, InvalidRequest, r"prompts\[1\]: token id 999"),
        ([5, "x"], None, TypeError, r"prompts\[1\]: expected a string or a list of token ids .*, not a list with str"),
        (b"x", None, TypeError, r"prompts\[1\]: expected a string or .* not bytes"),
        (bytearray(b"x"), None, TypeError, r"prompts\[1\]: expected a string or .* not bytearray"),
        ({"prompt": b"x"}, None, TypeError, r"prompts\[1\]: expected a string or .* not bytes"),
        (3.5, None, TypeError, r"prompts\[1\]: expected .* not float"),
        ({"prompt": "x", "multi_modal_data": {}}, None, ValueError, r"prompts\[1\]: 'multi_modal_data' is not supp"),
        ({}, None, ValueError, r"prompts\[1\]: has neither"),
        ("x", SamplingParams(logprobs=21), InvalidRequest, "logprobs: must be at most 20"),
        ("x", SamplingParams(min_tokens=600, max_tokens=600), InvalidRequest, "max_tokens: asks for 600 tokens"),
        ("x", SamplingParams(allowed_token_ids=[999]), InvalidRequest, "allowed_token_ids: token id 999"),
        ("x", SamplingParams(bad_words=[" "]), ValueError, "bad_words: .* only white space"),
        ("x", {"temprature": 1}, InvalidRequest, r"sampling_params\[1\].temprature: .* did you mean temperature"),
        ("x", {"stop_regex": "(?=x)"}, InvalidRequest, r"stop_regex: '\(\?=x\)': lookahead"),
        ("x", {"max_new_tokens": 600, "min_new_tokens": 600}, InvalidRequest, r"\[1\].max_new_tokens: asks for 600"),
        ("x", "greedy", TypeError, r"sampling_params\[1\]: expected logitship.SamplingParams or a dict, not str"),
        ("x", SamplingParams(custom_logit_processor=3), TypeError, "custom_logit_processor: expected a CustomLogit"),
        ("x", SamplingParams(custom_logit_processor="{"), InvalidRequest, "custom_logit_processor: .* not JSON"),
        ("x", SamplingParams(logits_processors=[3]), TypeError, r"logits_processors\[0\]: expected .* not int"),
        ("x", SamplingParams(logits_processors=[{"params": {}}]), InvalidRequest, r"_processors\[0\]: has neither"),
    ],
)  # fmt: skip
def test_invalid_prompt_is_found_before_any_runs(
    llm: LLM, prompt: Any, params: Any, error: type[Exception], message: str, assert_idle: Callable[[LLM], None]
) -> None:
    steps = llm._engine.stats().steps
    with pytest.raises(error, match=message):
        quiet(llm, ["hello", prompt], [GREEDY, GREEDY if params is None else params])
    assert llm._engine.stats().steps == steps
    assert_idle(llm)


@pytest.mark.parametrize("prompts", [b"The moon", b"", bytearray(b"The moon"), [b"The moon"]], ids=str)
def test_bytes_are_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts: expected a string or a list of token ids .*, not byte"):
        quiet(llm, prompts)


def test_number_of_sampling_params(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params: has 1 entries for 2 prompts"):
        quiet(llm, ["a", "b"], [GREEDY])


def test_refusal_notes_prompt_index(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        quiet(llm, ["x", [5] * 500], SamplingParams(min_tokens=100, max_tokens=100))
    assert caught.value.__notes__ == ["in prompts[1]"]
    assert caught.value.param == "max_tokens"
