from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.sampler.sampling_params import SamplingParams as EngineSamplingParams
from logitship.server.offline.sampling_params import _UNSUPPORTED, SGLANG_NAMES, SamplingParams
from logitship.server.refusals import BadRequest


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature) == (1, 16, 0, 1.0)
    assert (params.stop, params.bad_words, params.logits_processors) == ((), (), ())
    assert isinstance(params, EngineSamplingParams)


def test_strings_lists_and_none() -> None:
    params = SamplingParams(stop="a", bad_words="ab", stop_token_ids=[1, 1], logits_processors=[len])
    assert params.stop == ("a",)
    assert params.bad_words == ("ab",)
    assert params.stop_token_ids == {1}
    assert params.logits_processors == (len,)
    nothing: Any = None
    assert SamplingParams(stop=nothing, bad_words=nothing, logits_processors=nothing, logit_bias=nothing) == (
        SamplingParams()
    )


@pytest.mark.parametrize("name", sorted(_UNSUPPORTED))
def test_unsupported_vllm_fields(name: str) -> None:
    value = not _UNSUPPORTED[name] if isinstance(_UNSUPPORTED[name], bool) else object()
    with pytest.raises(InvalidSamplingParams, match=f"{name}: is not supported by logitship: leave it at") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    harmless: Any = {name: _UNSUPPORTED[name]}
    assert SamplingParams(**harmless) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n: must be an integer"),
        ({"n": True}, "n: must be an integer"),
        ({"n": 1.0}, "n: must be an integer"),
        ({"thinking_token_budget": -2}, "thinking_token_budget: must be an integer: 0 or greater, or -1"),
        ({"temperature": -1}, "temperature: must be 0"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode: must be one of raw_logprobs, processed_logprobs"),
        ({"custom_params": {"__req__": 1}}, "custom_params: the key '__req__'"),
        ({"custom_logit_processor": "a", "logits_processors": ["b"]}, "logits_processors: give either this or"),
        ({"logits_processors": len}, "logits_processors: must be a list of processors, not builtin_function"),
        ({"logits_processors": "a.b"}, "logits_processors: must be a list of processors, not str"),
        ({"eos_token_ids": [1]}, "eos_token_ids: is set by the engine: use stop_token_ids"),
        ({"processors": ("a",)}, "processors: is set by the engine: use logits_processors"),
        ({"custom_params": [1]}, "custom_params: must be a dict, not list"),
        ({"extra_args": "a"}, "extra_args: must be a dict, not str"),
        ({"logits_processors": {"processor": "a"}}, "logits_processors: must be a list of processors, not dict"),
    ],
)
def test_invalid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="max_tokns"):
        SamplingParams(max_tokns=3)  # type: ignore[call-arg]


def test_sampling_params_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0  # type: ignore[misc]
    assert dataclasses.replace(SamplingParams(n=2, bad_words=["a"]), temperature=0).n == 2


def test_clone() -> None:
    processor = object()
    params = SamplingParams(
        extra_args={"a": [1]}, custom_params={"b": [2]}, custom_logit_processor=processor, stop=["x"]
    )
    clone = params.clone()
    assert clone == params
    assert type(clone) is SamplingParams
    assert clone.custom_logit_processor is processor
    assert clone.extra_args is not None
    assert clone.custom_params is not None
    clone.extra_args["a"].append(3)
    clone.custom_params["b"].append(3)
    assert params.extra_args == {"a": [1]}
    assert params.custom_params == {"b": [2]}


def test_sglang_names() -> None:
    params = SamplingParams.from_sglang(
        {
            "max_new_tokens": 5,
            "min_new_tokens": 2,
            "sampling_seed": 7,
            "no_stop_trim": True,
            "stop": "a",
            "stop_regex": "b+",
            "logit_bias": {"3": 1.0},
            "custom_params": {"a": 1},
            "custom_logit_processor": "x",
            "extra_args": {"b": 2},
            "n": 3,
            "thinking_token_budget": 7,
        }
    )
    assert params == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        seed=7,
        include_stop_str_in_output=True,
        stop=["a"],
        stop_regex=["b+"],
        logit_bias={3: 1.0},
        custom_params={"a": 1},
        custom_logit_processor="x",
        extra_args={"b": 2},
        n=3,
        thinking_token_budget=7,
    )


def test_sglang_defaults_and_seed_alias() -> None:
    assert SamplingParams.from_sglang({}) == SamplingParams(max_tokens=128)
    assert SamplingParams.from_sglang({"seed": 3}).seed == 3
    assert SamplingParams.from_sglang({"max_new_tokens": None}).max_tokens is None


def test_sglang_errors_name_the_path() -> None:
    with pytest.raises(BadRequest, match=r"here.beam_width: is not supported"):
        SamplingParams.from_sglang({"beam_width": 2}, "here")
    with pytest.raises(BadRequest, match=r"here.top_k: "):
        SamplingParams.from_sglang({"top_k": "5"}, "here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": -1}, "here.max_new_tokens: must be 0 or greater"),
        ({"min_new_tokens": -1}, "here.min_new_tokens: must be 0 or greater"),
        (
            {"max_new_tokens": 1, "min_new_tokens": 2},
            "here.min_new_tokens: must not be greater than max_new_tokens",
        ),
        ({"temperature": -1}, "here.temperature: must be 0 (greedy) or greater"),
        ({"logits_processors": "a"}, "here.logits_processors: must be a list of processors, not str"),
    ],
)
def test_sglang_values_out_of_range_name_the_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SamplingParams.from_sglang(values, "here")
    assert str(caught.value).startswith(message)


def test_sglang_seed_that_contradicts_its_alias() -> None:
    with pytest.raises(BadRequest, match=r"here.seed: differs from sampling_seed"):
        SamplingParams.from_sglang({"seed": 1, "sampling_seed": 2}, "here")


def test_sglang_names_exist() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SGLANG_NAMES) <= fields
