"""Finds the first occurrence of a token sequence in a stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .token_sequence import TokenSequence


@dataclass(frozen=True)
class StringContainAutomaton:
    """RTP-LLM's automaton: a `TokenSequence` whose final state is absorbing, and that may be empty.

    Its status is the length of the longest prefix of the pattern at the end of the tokens so far. Once that is the
    whole pattern, it never changes: the stream contains the pattern. Every stream contains an empty pattern.

    Attributes:
        pattern: token ids.
    """

    pattern: tuple[int, ...]

    @cached_property
    def _sequence(self) -> TokenSequence:
        return TokenSequence(self.pattern)

    def step(self, status: int, token: int) -> int:
        """Return the status after another token."""
        if self.is_finished(status):
            return status
        return self._sequence.advance(status, token)

    def is_finished(self, status: int) -> bool:
        """Return whether the stream contains the pattern."""
        return status == len(self.pattern)

    def next_token(self, status: int) -> int:
        """Return the token that continues the pattern. Only if it is not finished."""
        return self.pattern[status]
