from __future__ import annotations

import dataclasses
import io
import logging
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GenerationConfig
from transformers.utils.logging import enable_progress_bar

from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel, ModelLoadError, load_model, load_vocabulary

PROMPT = [10, 20, 30, 40]


def logits(loaded: LoadedModel) -> torch.Tensor:
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        result: torch.Tensor = loaded.model(torch.tensor([PROMPT])).logits
    return result


@pytest.fixture
def folder(float32_model: LoadedModel, tmp_path: Path) -> Path:
    """The tiny model as a Hugging Face folder."""
    float32_model.model.save_pretrained(tmp_path / "tiny")
    float32_model.tokenizer.hf_tokenizer.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def interleaved(weight: torch.Tensor, heads: int) -> npt.NDArray[np.float32]:
    """Reorder a query or key projection as in GGUF files, where the two halves of a rotation are adjacent."""
    rows, columns = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).contiguous().numpy()


@pytest.fixture
def gguf_file(float32_model: LoadedModel, tmp_path: Path) -> Path:
    """The tiny model as a GGUF file, as llama.cpp's converter writes it."""
    config, weights = float32_model.model.config, float32_model.model.state_dict()
    hf_tokenizer = float32_model.tokenizer.hf_tokenizer
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = hf_tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    tokens[-1] = "qz"  # a tokenizer in a GGUF file has at least one merge
    writer.add_token_merges(["q z"])
    special = set(hf_tokenizer.all_special_ids)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(len(tokens))]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(hf_tokenizer.chat_template)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for module, name in names.items():
            weight = weights[f"model.layers.{layer}.{module}.weight"]
            data = interleaved(weight, heads[name]) if name in heads else weight.numpy()
            writer.add_tensor(f"blk.{layer}.{name}.weight", data)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", weights["lm_head.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_hugging_face_folder(folder: Path, float32_model: LoadedModel) -> None:
    loaded = load_model(ServerConfig(model_path=str(folder)))
    torch.testing.assert_close(logits(loaded), logits(float32_model), rtol=1e-4, atol=1e-4)
    assert (loaded.vocab_size, loaded.max_len, loaded.eos_token_ids) == (260, 512, {1})
    assert loaded.tokenizer.encode("héé") == float32_model.tokenizer.encode("héé")


def test_gguf_file(gguf_file: Path, float32_model: LoadedModel) -> None:
    loaded = load_model(ServerConfig(model_path=str(gguf_file)))
    torch.testing.assert_close(logits(loaded), logits(float32_model), rtol=1e-4, atol=1e-4)
    assert (loaded.vocab_size, loaded.max_len, loaded.eos_token_ids) == (260, 512, {1})
    assert loaded.tokenizer.encode("héé") == float32_model.tokenizer.encode("héé")
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(messages) == float32_model.tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("kind", ["folder", "gguf_file"])
def test_vocabulary_alone(kind: str, request: pytest.FixtureRequest, float32_model: LoadedModel) -> None:
    path: Path = request.getfixturevalue(kind)
    tokenizer, vocab_size = load_vocabulary(ServerConfig(model_path=str(path)))
    assert vocab_size == float32_model.vocab_size
    assert tokenizer.encode("hello") == float32_model.tokenizer.encode("hello")
    with pytest.raises(ModelLoadError, match="there is no folder '/does/not/exist'"):
        load_vocabulary(ServerConfig(model_path="/does/not/exist"))


def test_end_tokens_of_the_generation_config(folder: Path) -> None:
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    assert load_model(ServerConfig(model_path=str(folder))).eos_token_ids == {1, 7, 9}


def test_settings(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    config = ServerConfig(model_path=str(folder), dtype="bfloat16", chat_template=str(template), device="cpu")
    loaded = load_model(config)
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.tokenizer.decode(loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])) == "[hi]"


def test_separate_tokenizer_path(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "tokenizer"
    moved.mkdir()
    for file in folder.glob("tokenizer*"):
        file.rename(moved / file.name)
    loaded = load_model(ServerConfig(model_path=str(folder), tokenizer_path=str(moved)))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("abc")) == "abc"


@pytest.mark.parametrize("path", ["./nowhere", "nowhere.gguf", "/nowhere/at/all", "~nobody_/x", "~nobody_/x.gguf"])
def test_missing_path_is_named(path: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no"):
        load_model(ServerConfig(model_path=path))


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_model(ServerConfig(model_path=str(tmp_path)))


def test_tokenizer_that_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=f"cannot load the tokenizer '{empty}'"):
        load_model(ServerConfig(model_path=str(folder), tokenizer_path=str(empty)))
    file = folder / "config.json"
    with pytest.raises(ModelLoadError, match="--tokenizer-path takes a tokenizer's folder"):
        load_model(ServerConfig(model_path=str(folder), tokenizer_path=str(file)))


def test_missing_chat_template_is_named(folder: Path) -> None:
    config = ServerConfig(model_path=str(folder))
    with pytest.raises(ModelLoadError, match=r"nowhere\.jinja"):
        load_model(dataclasses.replace(config, chat_template="nowhere.jinja"))


class Screen(io.StringIO):
    """A standard error stream."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_bar_is_shown_in_a_terminal(
    folder: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    enable_progress_bar()  # type: ignore[no-untyped-call]
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    with caplog.at_level(logging.INFO):
        load_model(ServerConfig(model_path=str(folder), device="cpu"))
    assert ("Loading weights" in screen.getvalue()) == is_terminal
    assert f"loading the model {folder}" in caplog.messages
