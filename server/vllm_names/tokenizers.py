"""`vllm.tokenizers`: the model's tokenizer, as plugins load it in their constructors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from logitship.sampler.batch_processors.vllm_config import ModelConfig

_HUGGING_FACE_MODES = ("auto", "hf", "slow")


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """Load a Hugging Face tokenizer.

    Args:
        tokenizer_name: a folder, a GGUF file or a hub name.
        args: passed to `AutoTokenizer.from_pretrained`, as are `kwargs`.
        tokenizer_mode: "auto", "hf" or "slow".
        trust_remote_code: run the code that comes with the tokenizer.
        revision: revision of a hub name.
        download_dir: cache folder of hub files.
        kwargs: see `args`.

    Raises:
        ValueError: Hugging Face does not have this mode of vLLM.
        OSError: there is no such tokenizer.
    """
    if tokenizer_mode not in _HUGGING_FACE_MODES:
        modes = ", ".join(map(repr, _HUGGING_FACE_MODES))
        raise ValueError(f"tokenizer_mode {tokenizer_mode!r} needs vLLM; logitship has {modes}")
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    path = Path(tokenizer_name)
    if path.suffix == ".gguf":
        tokenizer_name, kwargs["gguf_file"] = path.parent, path.name
    return AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        trust_remote_code=trust_remote_code,
        revision=revision,
        cache_dir=download_dir,
        **kwargs,
    )


def cached_tokenizer_from_config(model_config: ModelConfig, **kwargs: Any) -> Any:
    """Return the served model's tokenizer: the engine's own object, or a new one if there are `kwargs`.

    Args:
        model_config: `vllm_config.model_config`.
        kwargs: passed to `get_tokenizer`.
    """
    if model_config.hf_tokenizer is not None and not kwargs:
        return model_config.hf_tokenizer
    return _cached_get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
        **kwargs,
    )


_cached_get_tokenizer = lru_cache(get_tokenizer)
