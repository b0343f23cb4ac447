"""The Hugging Face tokenizer that processors get inside another engine.

The engine's own tokenizer object is not used: sandboxes cannot unpickle it without the engine.
"""

from __future__ import annotations

import logging
from typing import Any


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
