from __future__ import annotations

import json
from typing import Any

import pytest

from logitship.client.http.vllm_handshake import PROBE
from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.server.vllm.extra_args import asks_for_plugin_info, has_processors, read_processors, sampling_params
from tests.server.vllm.conftest import MakeParams

TREE = json.dumps({"name": "tree"})


def test_has_processors(vllm_params: MakeParams) -> None:
    assert not has_processors(vllm_params())
    assert not has_processors(vllm_params({}))
    assert not has_processors(vllm_params({"custom_params": "{}", "unrelated": 1}))
    assert not has_processors(vllm_params({"custom_logit_processor": None}))
    assert has_processors(vllm_params({"custom_logit_processor": ""}))
    assert has_processors(vllm_params({"logits_processors": []}))


def test_asks_for_plugin_info(vllm_params: MakeParams) -> None:
    assert asks_for_plugin_info(vllm_params({**PROBE}))
    assert not asks_for_plugin_info(vllm_params({"logitship": "other"}))
    assert not asks_for_plugin_info(vllm_params())


def test_single_processor(processor_string: str) -> None:
    extra_args = {"custom_logit_processor": processor_string, "custom_params": '{"first": 3}', "others": [1]}
    (attached,) = read_processors(extra_args, 10_000)
    assert isinstance(attached.string, SourceProcessor)
    assert attached.params == {"first": 3}
    assert not attached.own


def test_list_of_processors_as_text_or_as_values(processor_string: str) -> None:
    several = [{"processor": processor_string, "params": {"first": 3}}, {"processor": TREE}]
    for value in (json.dumps(several), several):
        first, second = read_processors({"logits_processors": value, "custom_params": {"all": 1}}, 10_000)
        assert (first.params, first.own) == ({"first": 3}, True)
        assert (second.string, second.params, second.own) == (InstalledProcessor("tree"), {"all": 1}, False)


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        ({"custom_logit_processor": "{"}, "custom_logit_processor: the processor string is not JSON"),
        ({"custom_logit_processor": 3}, "custom_logit_processor: must be a processor string"),
        ({"custom_logit_processor": TREE, "custom_params": "{"}, "custom_params: is not JSON"),
        ({"custom_logit_processor": TREE, "custom_params": "[]"}, "custom_params: must be an object"),
        ({"custom_logit_processor": TREE, "custom_params": '{"__req__": 1}'}, "custom_params: the key '__req__'"),
        ({"custom_logit_processor": TREE, "logits_processors": "[]"}, "logits_processors: give either"),
        ({"logits_processors": "{}"}, "logits_processors: must be a list"),
        ({"logits_processors": "[]"}, "logits_processors: the list must have 1 to 64 processors, not 0"),
        ({"logits_processors": []}, "logits_processors: the list must have 1 to 64 processors, not 0"),
        ({"logits_processors": [{"processor": TREE}] * 65}, "logits_processors: the list must have 1 to 64"),
        ({"logits_processors": '[{"processor": 1}]'}, r"logits_processors\[0\]\.processor: must be"),
        ({"logits_processors": '["module.function"]'}, "callables by name are not taken"),
        ({"custom_logit_processor": TREE + " " * 1000}, "takes at most 1000"),
    ],
)
def test_malformed_arguments_are_refused(extra_args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read_processors(extra_args, 1000)


def test_sampling_params_seen_by_processors(vllm_params: MakeParams) -> None:
    params = vllm_params(
        temperature=0.5, top_k=3, min_tokens=2, stop=["x"], stop_token_ids=[5], logit_bias={4: 1.0}, bad_words=["b"]
    )
    seen = sampling_params(params, (), frozenset({1}))
    assert (seen.temperature, seen.top_k, seen.min_tokens, seen.max_tokens) == (0.5, 3, 2, 16)
    assert (seen.stop, seen.all_stop_token_ids, seen.logit_bias) == (("x",), {1, 5}, {4: 1.0})


def test_unsupported_sampling_params_are_refused(vllm_params: MakeParams) -> None:
    with pytest.raises(ValueError, match="repetition_penalty: must be from"):
        sampling_params(vllm_params(repetition_penalty=1000.0), (), frozenset())
