"""The `ModelView` of the model that SGLang serves."""

from __future__ import annotations

from typing import Any

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.model_view import load_tokenizer, view_of
from logitship_sglang import logger


def served_model(model_config: Any, arguments: Any) -> ModelView:
    """Return the width of the logits, the EOS tokens, and the Hugging Face tokenizer.

    Args:
        model_config: SGLang's `ModelConfig`.
        arguments: those of `resolved_arguments`.
    """
    tokenizer = None
    if not arguments.skip_tokenizer_init:
        name = arguments.tokenizer_path or arguments.model_path
        tokenizer = load_tokenizer(name, arguments.revision, arguments.trust_remote_code, logger)
    return view_of(model_config.vocab_size, model_config.hf_eos_token_id, tokenizer)
