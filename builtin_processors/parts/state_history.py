"""The states of an automaton along a sequence's output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")


class StateHistory(Generic[S]):
    """The state of an automaton after each output token, so that tokens can be removed.

    Assumptions:
    * States are immutable: copies of a history share them.
    * A sequence's tokens are only appended and removed at the end. If both happen between two calls, that is detected
      if there are fewer tokens, or the last known one differs. The engine itself restores the history object together
      with the tokens.

    Guarantees:
    * `follow` costs O(new tokens), or O(history) when it detects replaced tokens.

    Args:
        initial: the state before the first token.
    """

    def __init__(self, initial: S) -> None:
        self._states = [initial]
        self._tokens: list[int] = []

    def __len__(self) -> int:
        """Return the number of tokens followed. While `step` is called, its token is not included."""
        return len(self._tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHistory[S]:
        copied = copy.copy(self)
        copied._states, copied._tokens = self._states.copy(), self._tokens.copy()
        return copied

    def follow(self, output: Sequence[int], step: Callable[[S, int], S]) -> S:
        """Return the state after `output`.

        Args:
            output: the output tokens so far.
            step: returns the next state from a state and a token.
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
    """Return the length of the common prefix."""
    shorter = min(len(one), len(other))
    return next((index for index in range(shorter) if one[index] != other[index]), shorter)


def kept_length(tokens: Sequence[int], prompt: Sequence[int], output: Sequence[int]) -> int:
    """Return how many of the tokens that an index has seen are still those of prompt + output.

    Compares only the last one, unless it differs: outputs grow, or lose tokens at their end.
    """
    kept = min(len(prompt) + len(output), len(tokens))
    if kept > len(prompt) and tokens[kept - 1] != output[kept - len(prompt) - 1]:
        kept = common_length(tokens, [*prompt, *output])
    return kept
