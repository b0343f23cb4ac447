"""The states of an automaton along a sequence's output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class StateHistory(Generic[S]):
    """What an automaton's state was after each output token, so that tokens can be taken back.

    Assumptions:
    * A state is never changed, only followed by another one: copies of a history share them.
    * A sequence's tokens are only appended and taken back. Both between two calls are noticed if there are fewer tokens
      then, or the last one differs. The engine itself takes back the history object together with the tokens.

    Guarantees:
    * `follow` costs O(new tokens), or O(history) when it notices that tokens were exchanged.

    Args:
        initial: the state before the first token.
    """

    def __init__(self, initial: S) -> None:
        self._states = [initial]
        self._tokens: list[int] = []

    def __len__(self) -> int:
        """Number of tokens that were followed. While `step` is called: of those before its token."""
        return len(self._tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHistory[S]:
        twin = copy.copy(self)
        twin._states, twin._tokens = self._states.copy(), self._tokens.copy()
        return twin

    def follow(self, output: Sequence[int], step: Callable[[S, int], S]) -> S:
        """The state after `output`.

        Args:
            output: the output tokens so far.
            step: gives the state that follows a state and a token.
        """
        known = len(self._tokens)
        if known > len(output) or (known and output[known - 1] != self._tokens[-1]):
            known = common_length(self._tokens, output)
            del self._states[known + 1 :], self._tokens[known:]
        if known < len(output):
            for token in output[known:]:
                self._states.append(step(self._states[-1], token))
                self._tokens.append(token)
        return self._states[-1]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
