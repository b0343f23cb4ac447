"""The model's tokenizer, behind the few calls that the server needs. (Being written: this is the interface.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Tokenizer:
    """Wraps a Hugging Face tokenizer."""

    hf_tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """One token as text, for log-probability tables."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """One token as the bytes that it stands for."""
        raise NotImplementedError

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, chat_template: str | None = None, **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ValueError: there is no template, or it refuses the messages; says why.
        """
        raise NotImplementedError
