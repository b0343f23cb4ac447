"""Incremental detokenization: never half a character, never half a stop string."""

from __future__ import annotations

import copy
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from logitship.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one: an incomplete character has at most three tokens.
_MOST_PENDING_TOKENS = 3
# A run of tokens may never end at the end of a character. Since each push decodes all unread tokens, decoding starts
# over after this many.
_MOST_UNREAD_TOKENS = 32


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
        if not text.endswith(_REPLACEMENT) or len(self._ids) - self._read > _MOST_UNREAD_TOKENS:
            return self._advance(text)
        # A decoder writes an incomplete character as one U+FFFD, or as one for each of its bytes.
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        final = text[: len(text) - min(trailing, _MOST_PENDING_TOKENS)]
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
        for pending in range(1, min(_MOST_PENDING_TOKENS, len(self._ids)) + 1):
            text = self._decode(0, len(self._ids) - pending)
            if not text.endswith(_REPLACEMENT):
                self._read, self._emitted = len(self._ids) - pending, len(text)
                return

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


@dataclass(frozen=True)
class StopMatch:
    """A stop string that was found.

    Attributes:
        matched: the stop string.
        text: the rest of the sequence's text.
    """

    matched: str
    text: str


class StopStrings:
    """Finds stop strings in text that arrives in pieces.

    Text that could be the start of a stop string is held back until that is decided. The match is the stop string that
    ends first, and the longest of those, so that it does not depend on where the pieces end.

    The time of a piece grows with its length and that of the held text, not with the number of stop strings.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool) -> None:
        self._stop = _without_redundant(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str | StopMatch:
        """Add text. Returns the text that is final now, or the match that ends the sequence."""
        if not self._stop:
            return piece
        text = self._held + piece
        found: tuple[int, int] | None = None
        held_from = len(text)
        for begin in range(len(text)):
            if found is not None and begin >= found[0]:
                break
            rest = text[begin : begin + self._longest]
            above = bisect_right(self._stop, rest)
            if above and rest.startswith(self._stop[above - 1]):
                match = (begin + len(self._stop[above - 1]), begin)
                found = match if found is None else min(found, match)
            elif begin < held_from and above < len(self._stop) and self._is_beginning(rest, begin, text, above):
                held_from = begin
        if found is not None:
            end, begin = found
            self._held = ""
            return StopMatch(text[begin:end], text[: end if self._include else begin])
        self._held = text[held_from:]
        return text[:held_from]

    def flush(self) -> str:
        """Return the text that was held back: it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _is_beginning(self, rest: str, begin: int, text: str, above: int) -> bool:
        """Return whether the text from `begin` on is the beginning of a stop string."""
        return begin + len(rest) == len(text) and self._stop[above].startswith(rest)


@lru_cache(maxsize=32)  # the sequences of a request have the same
def _without_redundant(stop: tuple[str, ...]) -> tuple[str, ...]:
    """Return the stop strings, sorted, without those that begin with another: the other one ends first.

    Of the remaining ones, a text can only begin with the last that is not above it in the order, and only the first
    above it can begin with the text.
    """
    kept: list[str] = []
    for each in sorted(stop):
        if not (kept and each.startswith(kept[-1])):
            kept.append(each)
    return tuple(kept)
