"""The contexts of a sequence's tokens, to recognize those that repeat."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from logitship.builtin_processors.parts.state_history import common_length

from .g_values import hash_of


class ContextHistory:
    """Hashes of the contexts of a sequence's steps, each of its last tokens.

    Assumptions: as for `StateHistory`.

    Guarantees: a step costs O(new tokens + removed tokens) times the context's length; a copy is fast.

    Args:
        width: number of tokens of a context. Before the first tokens there are zeros, as in transformers.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._tokens: list[int] = [0] * width
        self._hashes: list[int] = []
        self._previous: list[int] = []
        """The last step before each one with the same context; -1: none."""
        self._last: dict[int, int] = {}
        """The last step with each context."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextHistory:
        copied = copy.copy(self)
        copied._tokens, copied._hashes = self._tokens.copy(), self._hashes.copy()
        copied._previous, copied._last = self._previous.copy(), self._last.copy()
        return copied

    def follow(self, output: Sequence[int]) -> tuple[int, int | None]:
        """Return the hash of the context of the next token, and how many steps ago there was the same; None: never.

        Args:
            output: the output tokens so far.
        """
        known = len(self._tokens) - self._width
        if known > len(output) or (known and output[known - 1] != self._tokens[-1]):
            known = common_length(self._tokens[self._width :], output)
        self._remove_steps(known)
        del self._tokens[self._width + known :]
        for token in output[known:]:
            self._add_step()
            self._tokens.append(token)
        self._add_step()
        step, previous = len(self._hashes) - 1, self._previous[-1]
        return self._hashes[-1], None if previous < 0 else step - previous

    def _remove_steps(self, number: int) -> None:
        """Remove all steps but the first ones."""
        while len(self._hashes) > number:
            context, previous = self._hashes.pop(), self._previous.pop()
            if previous < 0:
                del self._last[context]
            else:
                self._last[context] = previous

    def _add_step(self) -> None:
        """Add the step that follows the known tokens."""
        context = hash_of(self._tokens[len(self._tokens) - self._width :])
        self._previous.append(self._last.get(context, -1))
        self._last[context] = len(self._hashes)
        self._hashes.append(context)
