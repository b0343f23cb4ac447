"""The `ModelView` of the model that vLLM runs, and the token that ends failed requests."""

from __future__ import annotations

from typing import Any

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.hf_tokenizer import load_tokenizer

from .log import logger


def model_view(vllm_config: Any) -> ModelView:
    """Return the width of the logits, the EOS tokens, and the Hugging Face tokenizer, from vLLM's configuration."""
    config = vllm_config.model_config
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, config.trust_remote_code, logger)
    return ModelView(config.get_vocab_size(), _eos_token_ids(config, tokenizer), tokenizer)


def _eos_token_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return all tokens at which vLLM ends a sequence by default."""
    found = config.try_get_generation_config().get("eos_token_id")
    ids = {found} if isinstance(found, int) else set(found or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def fault_token(model: ModelView) -> int:
    """Return the token that ends a request whose processor failed: a plugin has no other way to end one.

    Requests with processors get it as a stop token, and the plugin prevents it from being sampled for any other reason.
    So it should be a token that no request needs. It is the last token of the first of these sets that is not empty:

    1. columns without a token in the tokenizer: most models pad their vocabulary,
    2. special tokens that do not end a sequence,
    3. all tokens.
    """
    all_tokens = range(model.vocab_size)
    if model.tokenizer is None:
        return all_tokens[-1]
    used = set(model.tokenizer.get_vocab().values())
    unused = [token for token in all_tokens if token not in used]
    added = model.tokenizer.added_tokens_decoder
    special = {token for token in added if added[token].special} | set(model.tokenizer.all_special_ids)
    harmless = sorted(token for token in special - model.eos_token_ids if token in all_tokens)
    return (unused or harmless or all_tokens)[-1]
