"""Token ids to text, one token at a time: never half a character, never half a stop string."""

from __future__ import annotations

from dataclasses import dataclass

from logitship.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one: at most three tokens can be its beginning.
_MOST_PENDING_TOKENS = 3


class IncrementalDetokenizer:
    """Text that grows with the tokens of one sequence.

    Each piece is the difference between two decodings that begin at the same token, because what a token means may
    depend on the one before it (a leading space, say). A piece that ends inside a character waits for the rest.
    The algorithm is that of Hugging Face's text-generation-inference, with a bound on the wait.

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
        """Where both decodings begin."""
        self._read = len(context)
        """How many tokens are text already."""
        self._known = self._decode(0, self._read)
        """Text of the tokens from `_begin` to `_read`."""
        if self._known.endswith(_REPLACEMENT):
            self._leave_unfinished_character()

    def push(self, token_id: int) -> str:
        """Text that is certain now."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""  # has no text, and does not end a character that is under way
        self._ids.append(token_id)
        for end in range(len(self._ids), self._read, -1):
            pending = len(self._ids) - end
            text = self._decode(self._begin, end)
            if not text.endswith(_REPLACEMENT) or pending == _MOST_PENDING_TOKENS:
                return self._advance(text, end)
            if len(self._ids) - self._read <= _MOST_PENDING_TOKENS:
                break  # the usual wait, for a character that is under way
        return ""

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for bytes that never became a character."""
        if len(self._ids) in (self._read, self._context_length):  # all given out, or nothing came
            return ""
        return self._advance(self._decode(self._begin, len(self._ids)), len(self._ids))

    def _leave_unfinished_character(self) -> None:
        """If the prompt ends inside a character, the character is the output's."""
        for pending in range(1, min(_MOST_PENDING_TOKENS, len(self._ids)) + 1):
            text = self._decode(0, len(self._ids) - pending)
            if not text.endswith(_REPLACEMENT):
                self._read, self._known = len(self._ids) - pending, text
                return

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces_between_special_tokens,
        )

    def _advance(self, text: str, end: int) -> str:
        piece = text[len(self._known) :]
        self._begin, self._read = self._read, end
        self._known = self._decode(self._begin, self._read)
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
