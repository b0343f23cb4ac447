from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.vllm_config import (
    ModelConfig,
    ReasoningConfig,
    SchedulerConfig,
    VllmConfig,
    vllm_config,
)


def make(**changes: Any) -> VllmConfig:
    settings: dict[str, Any] = {
        "model": "a/folder",
        "vocab_size": 260,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    return vllm_config(**(settings | changes))


def test_max_num_seqs_alone_is_required() -> None:
    config = VllmConfig(SchedulerConfig(max_num_seqs=3))
    assert config.scheduler_config.max_num_seqs == 3
    assert config.model_config is None
    assert config.speculative_config is None
    assert config.reasoning_config is None
    assert config.device_config.device_type == "cpu"
    assert config.parallel_config.world_size == 1
    assert config.additional_config == {}


def test_scheduler_and_device_config() -> None:
    config = make(max_num_batched_tokens=64, device=torch.device("cuda", 1))
    scheduler = config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len) == (4, 64, 512)
    assert scheduler.async_scheduling is False
    assert config.device_config.device == torch.device("cuda:1")
    assert config.device_config.device_type == "cuda"


def test_model_config() -> None:
    text = SimpleNamespace(vocab_size=260)
    hf_config = SimpleNamespace(get_text_config=lambda: text)
    tokenizer = object()
    model = make(hf_config=hf_config, hf_tokenizer=tokenizer, seed=7, logits_processors=("a:B",)).model_config
    assert model is not None
    assert (model.model, model.tokenizer, model.served_model_name) == ("a/folder", "a/folder", "a/folder")
    assert (model.max_model_len, model.dtype, model.seed) == (512, torch.bfloat16, 7)
    assert model.get_vocab_size() == 260
    assert model.hf_config is hf_config
    assert model.hf_text_config is text
    assert model.hf_tokenizer is tokenizer
    assert model.logits_processors == ["a:B"]


def test_defaults_match_vllm() -> None:
    model = make(tokenizer="another", served_model_name="name").model_config
    assert model is not None
    assert (model.tokenizer, model.served_model_name) == ("another", "name")
    assert (model.tokenizer_mode, model.tokenizer_revision, model.trust_remote_code) == ("auto", None, False)
    assert (model.seed, model.logprobs_mode, model.logits_processors) == (0, "raw_logprobs", None)
    assert (model.hf_config, model.hf_text_config) == (None, None)


def test_reasoning_config() -> None:
    reasoning = ReasoningConfig(
        reasoning_start_str="<think>",
        reasoning_end_str="Time is up.</think>",
        reasoning_start_token_ids=[2],
        reasoning_end_token_ids=[7, 3],
        natural_reasoning_end_token_ids=[3],
    )
    assert make().reasoning_config is None
    config = make(reasoning_config=reasoning)
    assert config.reasoning_config is reasoning
    assert (reasoning.enabled, reasoning.reasoning_parser) == (True, "")


def test_unknown_setting_lists_known_ones() -> None:
    config: Any = make()
    with pytest.raises(
        AttributeError,
        match=r"logitship's VllmConfig has no 'cache_config', only: additional_config, device_config, lora_config, "
        r"model_config, parallel_config, quant_config, reasoning_config, scheduler_config, speculative_config$",
    ):
        _ = config.cache_config
    with pytest.raises(AttributeError, match=r"no 'multimodal_config', only: dtype, get_vocab_size, hf_config, "):
        _ = config.model_config.multimodal_config
    with pytest.raises(AttributeError, match=r"DeviceConfig has no 'gpu', only: device, device_type$"):
        _ = config.device_config.gpu
    assert getattr(config, "cache_config", "a default") == "a default"
    assert not hasattr(config.scheduler_config, "policy")


def test_configs_copy_and_pickle() -> None:
    config = make()
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert isinstance(other.model_config, ModelConfig)
        assert other.model_config.max_model_len == 512


def test_configs_are_frozen() -> None:
    config: Any = make()
    with pytest.raises(AttributeError, match="cannot assign"):
        config.model_config.max_model_len = 1
