"""The `ModelView` of the model that SGLang serves."""

from __future__ import annotations

from typing import Any

from logitship.sampler.processors.request_view import ModelView
from logitship.server.plugins.hf_tokenizer import load_tokenizer

from .refusal import logger


def served_model(model_config: Any, server_args: Any) -> ModelView:
    """Return the width of the logits, the end tokens, and the Hugging Face tokenizer.

    Args:
        model_config: SGLang's `ModelConfig`.
        server_args: SGLang's `ServerArgs`.
    """
    tokenizer = None
    if not server_args.skip_tokenizer_init:
        name = server_args.tokenizer_path or server_args.model_path
        tokenizer = load_tokenizer(name, server_args.revision, server_args.trust_remote_code, logger)
    ends = set(model_config.hf_eos_token_id or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return ModelView(model_config.vocab_size, frozenset(ends), tokenizer)
