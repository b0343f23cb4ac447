"""The view that processors get of an engine's model, with a Hugging Face tokenizer.

The engine's own tokenizer object is not used: sandboxes cannot unpickle it without the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from logitship.sampler.processors.request_view import ModelView


def load_tokenizer(name: str, revision: str | None, trust_remote_code: bool, logger: logging.Logger) -> Any:
    """Load the tokenizer with transformers; None if it cannot: processors that need none still run."""
    from transformers import AutoTokenizer

    transformers_logger = logging.getLogger("transformers")
    level = transformers_logger.level
    transformers_logger.setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    # transformers does not know the tokenizers of some models.
    except Exception as error:  # noqa: BLE001  # boundary: third-party code
        logger.warning("processors get no tokenizer: transformers cannot load %s: %s", name, error)
        return None
    finally:
        transformers_logger.setLevel(level)


def view_of(vocab_size: int, ends: int | Iterable[int] | None, tokenizer: Any) -> ModelView:
    """Return the processors' view of an engine's model.

    Args:
        vocab_size: width of the logits.
        ends: tokens at which the engine ends a sequence by default, beside the tokenizer's EOS token.
        tokenizer: what `load_tokenizer` returned, or None.
    """
    ids = {ends} if isinstance(ends, int) else set(ends or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ModelView(vocab_size, frozenset(ids), tokenizer)
