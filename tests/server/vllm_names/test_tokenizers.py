from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from logitship.sampler.batch_processors.vllm_config import ModelConfig
from logitship.server.tokenizer import Tokenizer
from logitship.server.vllm_names.tokenizers import cached_tokenizer_from_config, get_tokenizer


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer.hf_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def model_config(folder: Path) -> ModelConfig:
    return ModelConfig(
        model="somewhere else", tokenizer=str(folder), max_model_len=8, vocab_size=260, dtype=torch.float32
    )


def test_get_tokenizer_as_plugins_call_it(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    loaded = get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
    )
    assert loaded.encode("a</think>") == tokenizer.encode("a</think>")


def test_get_tokenizer_with_a_path_and_options(folder: Path) -> None:
    assert get_tokenizer(folder, padding_side="left").padding_side == "left"


def test_get_tokenizer_with_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, object]] = []

    def from_pretrained(name: object, **options: object) -> None:
        calls.append((name, options["gguf_file"]))

    monkeypatch.setattr("logitship.server.vllm_names.tokenizers.AutoTokenizer.from_pretrained", from_pretrained)
    get_tokenizer(tmp_path / "model.gguf")
    assert calls == [(tmp_path, "model.gguf")]


def test_unsupported_tokenizer_modes(folder: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer_mode 'mistral' needs vLLM; logitship has 'auto', 'hf', 'slow'"):
        get_tokenizer(folder, tokenizer_mode="mistral")


def test_engine_tokenizer_is_reused(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    model_config = dataclasses.replace(model_config, hf_tokenizer=tokenizer.hf_tokenizer)
    assert cached_tokenizer_from_config(model_config) is tokenizer.hf_tokenizer
    left = cached_tokenizer_from_config(model_config, padding_side="left")
    assert left is not tokenizer.hf_tokenizer
    assert left.padding_side == "left"


def test_tokenizer_is_cached(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    loaded = cached_tokenizer_from_config(model_config)
    assert loaded.encode("a") == tokenizer.encode("a")
    assert cached_tokenizer_from_config(model_config) is loaded
