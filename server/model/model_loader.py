"""Loads the model and the tokenizer of `--model-path`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from logitship.server.config import ServerConfig
from logitship.server.tokenizer import Tokenizer

from .memory_check import outline_of, require_memory
from .model_source import ModelLoadError, ModelSource, find_device, find_model

logger = logging.getLogger(__name__)


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


def load_model(config: ServerConfig) -> LoadedModel:
    """Load the model that `config` names.

    Raises:
        ModelLoadError: it does not exist, or is not a causal language model.
        ModelFetchError: it is the default model, and could not be fetched.
        NotEnoughMemory: its weights do not fit into the memory that this process may use.
    """
    if not (sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)):
        disable_progress_bar()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    device = find_device(config.device)
    model_name = f"model {config.model_path!r}"
    source = find_model(config.model_path, config.trust_remote_code)
    hf_tokenizer = _load_tokenizer(config, source)
    with _load_errors(model_name):
        hf_config = AutoConfig.from_pretrained(source.name, **source.options)
        dtype = _dtype(config, hf_config, device)
    outline = outline_of(hf_config, dtype, config.trust_remote_code)
    if outline is not None:
        require_memory(outline, config.model_path)
    with _load_errors(model_name):
        model = AutoModelForCausalLM.from_pretrained(source.name, dtype=dtype, **source.options)
        torch.nn.Module.to(model, device)  # transformers' own `to` is untyped
    if config.chat_template:
        hf_tokenizer.chat_template = _read_chat_template(config.chat_template)
    text_config = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        "loaded %s in %.1f s: %.0f million parameters, %s on %s",
        type(model).__name__,
        time.monotonic() - started,
        parameters / 1e6,
        str(model.dtype).removeprefix("torch."),
        device,
    )
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(hf_tokenizer),
        eos_token_ids=_eos_token_ids(model, hf_tokenizer),
        vocab_size=text_config.vocab_size,
        max_len=getattr(text_config, "max_position_embeddings", None) or 4096,
    )


def load_vocabulary(config: ServerConfig) -> tuple[Tokenizer, int]:
    """Load the tokenizer of the model that `config` names, without the model.

    Returns:
        The tokenizer, and the number of columns of the model's logits.

    Raises:
        ModelLoadError: as `load_model`.
        ModelFetchError: as `load_model`.
    """
    source = find_model(config.model_path, config.trust_remote_code)
    hf_tokenizer = _load_tokenizer(config, source)
    with _load_errors(f"model {config.model_path!r}"):
        hf_config = AutoConfig.from_pretrained(source.name, **source.options)
    return Tokenizer(hf_tokenizer), hf_config.get_text_config().vocab_size


def _load_tokenizer(config: ServerConfig, source: ModelSource) -> Any:
    name = f"model {config.model_path!r}"
    if config.tokenizer_path:
        source = find_model(config.tokenizer_path, config.trust_remote_code, "tokenizer")
        name = f"tokenizer {config.tokenizer_path!r}"
    logger.info("loading the model %s", config.model_path)
    with _load_errors(name):
        return AutoTokenizer.from_pretrained(source.name, **source.options)


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
    """Raise what transformers raises for unusable models and tokenizers as a `ModelLoadError`."""
    try:
        yield
    except (OSError, ValueError, ImportError, LookupError, RuntimeError) as error:
        raise ModelLoadError(f"cannot load the {name}: {type(error).__name__}: {error}") from error


def _read_chat_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"cannot read the chat template {path!r}: {error}") from error


def _dtype(config: ServerConfig, hf_config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype. `auto` is the checkpoint's own on an accelerator, and on a CPU float32: fast and exact."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif device.type == "cpu":
        dtype = torch.float32
    else:
        dtype = getattr(hf_config.get_text_config(), "dtype", None) or torch.bfloat16
    assert isinstance(dtype, torch.dtype)
    return dtype


def _eos_token_ids(model: PreTrainedModel, hf_tokenizer: Any) -> frozenset[int]:
    """Return the EOS tokens of the generation config and the tokenizer: chat models end turns with another token."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    found: set[int] = set()
    for value in (getattr(generation, "eos_token_id", None), hf_tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
