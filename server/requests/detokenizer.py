"""Token ids to text, one token at a time: never half a character, never half a stop string."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from logitship.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one: at most three tokens can be its beginning.
_MOST_PENDING_TOKENS = 3
# Tokens may go on without ever ending where a character ends. Decoding is begun anew after so many: each push costs
# as much as there are.
_MOST_UNREAD_TOKENS = 32


class IncrementalDetokenizer:
    """Text that grows with the tokens of one sequence.

    Each piece is the difference between two decodings that begin at the same token, because what a token means may
    depend on the one before it (a leading space, say). What may be the beginning of a character waits for the rest.
    The algorithm is that of Hugging Face's text-generation-inference, with bounds: broken bytes hold back three
    characters at most.

    Args:
        context: the prompt's last tokens, which the text continues.
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
        """Where decoding begins."""
        self._read = len(context)
        """Where it begins next: the tokens before have been given out, and no character goes across."""
        text = self._decode(0, self._read)
        self._given = len(text)
        """Characters of the text from `_begin` on that have been given out."""
        if text.endswith(_REPLACEMENT):
            self._leave_unfinished_character()

    def push(self, token_id: int) -> str:
        """Text that is certain now."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""  # has no text, and does not end a character that is under way
        self._ids.append(token_id)
        text = self._decode(self._begin, len(self._ids))
        if not text.endswith(_REPLACEMENT) or len(self._ids) - self._read > _MOST_UNREAD_TOKENS:
            return self._advance(text)
        # A decoder writes the beginning of a character as one U+FFFD, or as one for each of its bytes.
        at_the_end = len(text) - len(text.rstrip(_REPLACEMENT))
        certain = text[: len(text) - min(at_the_end, _MOST_PENDING_TOKENS)]
        piece = certain[self._given :]
        self._given = max(self._given, len(certain))
        return piece

    def fork(self) -> IncrementalDetokenizer:
        """The same so far, to go on by itself."""
        twin = copy.copy(self)
        twin._ids = self._ids.copy()
        return twin

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for bytes that never became a character."""
        if len(self._ids) in (self._read, self._context_length):  # all given out, or nothing came
            return ""
        return self._advance(self._decode(self._begin, len(self._ids)))

    def _leave_unfinished_character(self) -> None:
        """If the prompt ends inside a character, the character is the output's."""
        for pending in range(1, min(_MOST_PENDING_TOKENS, len(self._ids)) + 1):
            text = self._decode(0, len(self._ids) - pending)
            if not text.endswith(_REPLACEMENT):
                self._read, self._given = len(self._ids) - pending, len(text)
                return

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )

    def _advance(self, text: str) -> str:
        piece = text[self._given :]
        self._begin, self._read = self._read, len(self._ids)
        self._given = len(self._decode(self._begin, self._read))
        return piece


@dataclass(frozen=True)
class StopMatch:
    """A stop string that was found.

    Attributes:
        matched: which one.
        text: what may still be given out.
    """

    matched: str
    text: str


class StopStrings:
    """Finds stop strings in text that arrives in pieces.

    What could be the beginning of a stop string is held back until it is decided. The match is the one that is
    complete first, and the longest of those: so it does not depend on where the pieces end.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool) -> None:
        self._stop = stop
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str | StopMatch:
        """Text to give out, or the match that ends the sequence."""
        if not self._stop:
            return piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, begin, stop = min(found)
            self._held = ""
            return StopMatch(stop, text[: end if self._include else begin])
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and shorter than it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
