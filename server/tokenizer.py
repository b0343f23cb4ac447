"""The model's tokenizer, and the text of tokens as they arrive: never half a character."""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one: an incomplete character has at most three tokens.
_MAX_PENDING_TOKENS = 3
# A run of tokens may never end at the end of a character. Since each push decodes all unread tokens, decoding starts
# over after this many.
_MAX_UNREAD_TOKENS = 32


class Tokenizer:
    """Wraps a Hugging Face tokenizer, reduced to the calls that the server needs. Safe to call from several threads."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text."""
        ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Detokenize. Invalid UTF-8 becomes U+FFFD."""
        if self._decodes_with_backend:
            plain: str = self.hf_tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return plain
        options: dict[str, Any] = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not self.hf_tokenizer.is_fast:  # fast tokenizers add no such spaces
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        text: str = self.hf_tokenizer.decode(token_ids, **options)
        return text

    def token(self, token_id: int) -> str:
        """Return a token as it is in the vocabulary; "" for ids without one."""
        token: str | None = self.hf_tokenizer.convert_ids_to_tokens(token_id)
        return token or ""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, for log-probabilities."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token.

        A byte-level tokenizer encodes each byte as one printable character, a tokenizer with byte fallback as `<0xNN>`.
        Other tokens are text.
        """
        token = self.hf_tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id in self._special_ids:
            return self.token_text(token_id).encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return self.token_text(token_id).encode()

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` drops the token."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_characters: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render a conversation and tokenize it.

        Args:
            messages: the conversation.
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: end within the last message.
            max_characters: longest rendered text that is tokenized. None: any.
            **template_kwargs: variables for the template.

        Raises:
            ValueError: there is no template, it rejects the messages, or their text is too long.
        """
        if not (template_kwargs.get("chat_template") or self.hf_tokenizer.chat_template):
            raise ValueError("this model has no chat template: start the server with --chat-template FILE")
        try:
            text = self.hf_tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        # A chat template is a program of the model's author.
        except Exception as error:  # boundary: third-party code
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        if max_characters is not None and len(text) > max_characters:
            raise ValueError(f"the chat template makes {len(text)} characters of them, more than {max_characters}")
        # The template already contains the special tokens.
        return self.encode(text, add_special_tokens=False)

    def template_uses(self, variable: str) -> bool:
        """Return whether the chat template mentions a variable."""
        template = str(self.hf_tokenizer.chat_template or "")  # some models have several, by name
        return re.search(rf"\b{variable}\b", template) is not None

    def template_contains(self, text: str) -> bool:
        """Return whether the chat template contains a text."""
        return text in str(self.hf_tokenizer.chat_template or "")

    @cached_property
    def longest_token(self) -> int:
        """Upper bound on the length of a token's text, in characters."""
        # A vocabulary entry (one character per byte, `<0xNN>`, `##ing`) is never shorter than the token's text.
        return max(len(token) for token in self.hf_tokenizer.get_vocab())

    @cached_property
    def _decodes_with_backend(self) -> bool:
        """True if the class leaves decoding to its Rust backend. Calling that directly is five times faster."""
        cls = type(self.hf_tokenizer)
        return (
            issubclass(cls, PreTrainedTokenizerFast)
            and cls.decode is PreTrainedTokenizerBase.decode
            and cls._decode is PreTrainedTokenizerFast._decode
        )

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.hf_tokenizer.all_special_ids)

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in str(getattr(backend, "decoder", ""))


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into text as they arrive.

    Each piece is the difference between two decodings that start at the same token, because the text of a token may
    depend on the one before it (a leading space, for example). The bytes of an incomplete character are held back. This
    is the algorithm of Hugging Face's text-generation-inference, with a limit: invalid bytes hold back at most three
    characters.

    Args:
        context: the last tokens of the prompt, which the text continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: list[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces_between_special_tokens = spaces_between_special_tokens
        self._ids = list(context)
        self._context_length = len(context)
        self._begin = 0
        """Index of the token where decoding starts."""
        self._read = len(context)
        """Index where it starts next: all text before it was emitted, and no character spans it."""
        text = self._decode(0, self._read)
        self._emitted = len(text)
        """Characters of the text from `_begin` on that were emitted."""
        if text.endswith(_REPLACEMENT):
            self._exclude_incomplete_character()

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is final now."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""  # has no text, and does not end an incomplete character
        self._ids.append(token_id)
        text = self._decode(self._begin, len(self._ids))
        if not text.endswith(_REPLACEMENT) or len(self._ids) - self._read > _MAX_UNREAD_TOKENS:
            return self._advance(text)
        # A decoder writes an incomplete character as one U+FFFD, or as one for each of its bytes.
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        final = text[: len(text) - min(trailing, _MAX_PENDING_TOKENS)]
        piece = final[self._emitted :]
        self._emitted = max(self._emitted, len(final))
        return piece

    def fork(self) -> IncrementalDetokenizer:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._ids = self._ids.copy()
        return fork

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for incomplete characters."""
        if len(self._ids) in (self._read, self._context_length):  # all emitted, or no output
            return ""
        return self._advance(self._decode(self._begin, len(self._ids)))

    def _exclude_incomplete_character(self) -> None:
        """Make a character that the prompt ends inside of part of the output."""
        for pending in range(1, min(_MAX_PENDING_TOKENS, len(self._ids)) + 1):
            text = self._decode(0, len(self._ids) - pending)
            if not text.endswith(_REPLACEMENT):
                self._read, self._emitted = len(self._ids) - pending, len(text)
                return
        # The text before it ends with a U+FFFD of its own, so that only the bytes tell them apart.
        for pending in range(1, min(_MAX_PENDING_TOKENS, len(self._ids)) + 1):
            if _is_incomplete(b"".join(self._bytes(token_id) for token_id in self._ids[-pending:])):
                self._read = len(self._ids) - pending
                self._emitted = len(self._decode(0, self._read))
                return

    def _bytes(self, token_id: int) -> bytes:
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return b"" if is_skipped else self._tokenizer.token_bytes(token_id)

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )

    def _advance(self, text: str) -> str:
        piece = text[self._emitted :]
        self._begin, self._read = self._read, len(self._ids)
        self._emitted = len(self._decode(self._begin, self._read))
        return piece


def _is_incomplete(data: bytes) -> bool:
    """Return whether bytes are the beginning of one character of UTF-8."""
    try:
        return data != b"" and codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from printable characters to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF = _byte_level_alphabet()
