"""What processors may know of the model that vLLM runs, out of vLLM's configuration."""

from __future__ import annotations

import logging
from typing import Any

from logitship.sampler.processors.request_view import ModelView

from .log import logger


def model_view(vllm_config: Any) -> ModelView:
    """The width of the logits, the end tokens, and the tokenizer, as Hugging Face's own class.

    vLLM's own tokenizer object is not used: sandboxes could not unpickle it without vLLM.
    """
    config = vllm_config.model_config
    tokenizer = None if config.skip_tokenizer_init else _tokenizer(config)
    return ModelView(config.get_vocab_size(), _eos_token_ids(config, tokenizer), tokenizer)


def _tokenizer(config: Any) -> Any:
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
        )
    # Some models have a tokenizer that transformers does not know. Processors that need none still run.
    except Exception as error:  # noqa: BLE001
        logger.warning("processors get no tokenizer: transformers cannot load %s: %s", config.tokenizer, error)
        return None


def _eos_token_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """All that vLLM ends a sequence at by itself."""
    found = config.try_get_generation_config().get("eos_token_id")
    ids = {found} if isinstance(found, int) else set(found or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def fault_token(model: ModelView) -> int:
    """The token that ends a request whose processor failed: vLLM gives a plugin no other way to end one.

    Requests with processors get it as a stop token, and the plugin keeps it from being drawn for any other reason. So
    it should be one that nobody misses. The last of the first of these:

    1. the columns that no token of the tokenizer has: most models pad their vocabulary,
    2. the special tokens that do not end a sequence,
    3. all tokens.
    """
    everything = range(model.vocab_size)
    if model.tokenizer is None:
        return everything[-1]
    used = set(model.tokenizer.get_vocab().values())
    unused = [token for token in everything if token not in used]
    added = model.tokenizer.added_tokens_decoder
    special = {token for token in added if added[token].special} | set(model.tokenizer.all_special_ids)
    harmless = sorted(token for token in special - model.eos_token_ids if token in everything)
    return (unused or harmless or everything)[-1]
