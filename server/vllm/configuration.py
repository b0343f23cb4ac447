"""vLLM's configuration, as far as the plugin reads it: the model, the fault token, and when calls may begin."""

from __future__ import annotations

from typing import Any

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.model_view import load_tokenizer, view_of

from .settings import logger


def model_view(vllm_config: Any) -> ModelView:
    """Return the width of the logits, the EOS tokens, and the Hugging Face tokenizer, from vLLM's configuration."""
    config = vllm_config.model_config
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, config.trust_remote_code, logger)
    return view_of(config.get_vocab_size(), config.try_get_generation_config().get("eos_token_id"), tokenizer)


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


def begins_early(vllm_config: Any) -> bool:
    """Return whether calls may begin before the model computes.

    That takes two things. The last tokens are known: with asynchronous scheduling, vLLM plans a step before it has
    them. And vLLM samples what it plans: an instance that only encodes images samples nothing.
    """
    encoders = vllm_config.ec_transfer_config
    only_encodes = encoders is not None and encoders.is_encode_only
    return not vllm_config.scheduler_config.async_scheduling and not only_encodes
