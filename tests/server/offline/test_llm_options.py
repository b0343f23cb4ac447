from __future__ import annotations

import re
from typing import Any

import pytest

from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.offline.llm_options import read_options


def test_own_code_is_enabled_by_default() -> None:
    assert read_options(DEFAULT_MODEL, (), {}) == ServerConfig(
        enable_custom_logit_processor=True, logits_processor_pattern=".*", processor_isolation="none"
    )
    assert read_options(DEFAULT_MODEL, (), {"processor_isolation": "sandbox"}).processor_isolation == "sandbox"
    assert not read_options(DEFAULT_MODEL, (), {"enable_custom_logit_processor": False}).enable_custom_logit_processor


def test_aliases_of_vllm_and_sglang() -> None:
    options = {
        "tokenizer": "t",
        "seed": 3,
        "gpu_memory_utilization": 0.25,
        "max_running_requests": 4,
        "context_length": 100,
        "dtype": "bfloat16",
    }
    config = read_options("m", [dict], options)
    assert (config.model_path, config.tokenizer_path, config.random_seed) == ("m", "t", 3)
    assert (config.mem_fraction_static, config.max_num_seqs, config.max_model_len) == (0.25, 4, 100)
    assert config.dtype == "bfloat16"
    assert config.logits_processors == (dict,)
    assert read_options(DEFAULT_MODEL, None, {"model_path": "m"}).model_path == "m"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (DEFAULT_MODEL, {"max_num_seq": 3}, "max_num_seq: unknown option, did you mean max_num_seqs?"),
        (DEFAULT_MODEL, {"zzz": 3}, "zzz: unknown option"),
        (DEFAULT_MODEL, {"port": 3}, "port: is an option of `logitship serve`"),
        (DEFAULT_MODEL, {"shipping_api_key": "k"}, "shipping_api_key: is an option of `logitship serve`"),
        (DEFAULT_MODEL, {"seed": 3, "random_seed": 3}, "random_seed: sets random_seed a second time"),
        ("m", {"model_path": "m"}, "model_path: sets model_path a second time"),
    ],
)
def test_unknown_and_duplicate_options(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        read_options(model, (), options)


def test_single_name_of_a_batch_processor_is_refused() -> None:
    with pytest.raises(TypeError, match="logits_processors: must be a list of processors, not str: put it in a list"):
        read_options(DEFAULT_MODEL, "module:Class", {})


def test_option_values_are_checked() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be 1 or greater"):
        read_options(DEFAULT_MODEL, (), {"max_num_seqs": 0})
