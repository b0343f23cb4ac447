"""Tiny model for benchmarks in which the model does not matter."""

from __future__ import annotations

import shutil
from pathlib import Path

from logitship.server.model.default_model import default_model_folder


def model_named(name: str, folder: Path) -> Path:
    """Return the folder of a model.

    Args:
        name: a folder; `default`: the default model; `tiny`: a tiny one.
        folder: where the tiny one is made.
    """
    if name == "tiny":
        return tiny_model(folder / "model", default_model_folder())
    return default_model_folder() if name == "default" else Path(name)


def tiny_model(folder: Path, tokenizer: Path) -> Path:
    """Return a fast model with random weights, and the tokenizer of another one.

    Args:
        folder: to be made.
        tokenizer: the folder of the model whose tokenizer it has.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    known = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 dimensions: vLLM on a CPU takes no fewer
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    return folder
