"""Loads the model and the tokenizer of `--model-path`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.refusals import StartError
from logitship.server.tokenizer import Tokenizer

from .default_model import default_model_folder

logger = logging.getLogger(__name__)


class ModelLoadError(StartError):
    """The model or its tokenizer could not be loaded; the message says what to do."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        eos_token_ids: the tokens that end a sequence.
        max_len: the longest sequence that the model was trained for, in tokens.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_len: int


@dataclass(frozen=True)
class _Source:
    """Arguments of `from_pretrained`: a folder, a hub name, or a GGUF file in a folder."""

    name: str
    options: dict[str, Any]


def load_model(config: ServerConfig) -> LoadedModel:
    """Load the model that `config` names.

    Raises:
        ModelLoadError: it does not exist, or is not a causal language model.
        ModelFetchError: it is the default model, and could not be fetched.
    """
    # The weights are mapped into memory, not read: the bar would only flicker. Downloads have their own bars.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    source = _source(config.model_path, config.trust_remote_code)
    tokenizer_source = _source(config.tokenizer_path, config.trust_remote_code) if config.tokenizer_path else source
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(tokenizer_source.name, **tokenizer_source.options)
        hf_config = AutoConfig.from_pretrained(source.name, **source.options)
        model = AutoModelForCausalLM.from_pretrained(source.name, dtype=_dtype(config, hf_config), **source.options)
        torch.nn.Module.to(model, _device(config))  # transformers' own `to` is untyped
    except (
        OSError,
        ValueError,
        ImportError,
        LookupError,
        RuntimeError,
    ) as error:  # raised by transformers for unusable models
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"cannot load the model {config.model_path!r}: {reason}") from error
    if config.chat_template:
        hf_tokenizer.chat_template = _read_chat_template(config.chat_template)
    text_config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(hf_tokenizer),
        eos_token_ids=_eos_token_ids(model, hf_tokenizer),
        vocab_size=text_config.vocab_size,
        max_len=getattr(text_config, "max_position_embeddings", None) or 4096,
    )


def _source(path: str, trust_remote_code: bool) -> _Source:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if path == DEFAULT_MODEL:
        return _Source(str(default_model_folder()), options)
    if path.endswith(".gguf"):
        file = Path(path)
        if not file.is_file():
            raise ModelLoadError(f"there is no GGUF file {path!r}")
        return _Source(str(file.parent), options | {"gguf_file": file.name})
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise ModelLoadError(f"there is no folder {path!r}")
    return _Source(str(Path(path).expanduser()) if path.startswith("~") else path, options)


def _read_chat_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read the chat template {path!r}: {error}") from error


def _device(config: ServerConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: ServerConfig, hf_config: Any) -> torch.dtype:
    """Return the dtype. `auto` is the checkpoint's own on an accelerator, and on a CPU float32: fast and exact."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif _device(config).type == "cpu":
        dtype = torch.float32
    else:
        dtype = getattr(hf_config.get_text_config(), "dtype", None) or torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    return dtype


def _eos_token_ids(model: PreTrainedModel, hf_tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of the generation config and the tokenizer: chat models end turns with another token."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    found: set[int] = set()
    for value in (getattr(generation, "eos_token_id", None), hf_tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
