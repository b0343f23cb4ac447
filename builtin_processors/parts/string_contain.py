"""Finds a string of tokens in a stream of tokens, once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .token_sequence import TokenSequence


@dataclass(frozen=True)
class StringContainAutomaton:
    """RTP-LLM's automaton: a `TokenSequence` that stays where it is once it was found, and that may be empty.

    Its status is the length of the longest beginning of the pattern that the tokens so far end with. Once that is the
    whole pattern, it stays: the stream contains the pattern. An empty pattern is contained in everything.

    Attributes:
        pattern: token ids.
    """

    pattern: tuple[int, ...]

    @cached_property
    def _sequence(self) -> TokenSequence:
        return TokenSequence(self.pattern)

    def step(self, status: int, token: int) -> int:
        """The status after another token."""
        if self.is_finished(status):
            return status
        return self._sequence.advance(status, token)

    def is_finished(self, status: int) -> bool:
        """True once the stream contains the pattern."""
        return status == len(self.pattern)

    def next_token(self, status: int) -> int:
        """The token that continues the pattern, which is not finished."""
        return self.pattern[status]
