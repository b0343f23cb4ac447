"""The position of a sequence's output in its grammar."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Self

from llguidance import LLMatcher

from logitship.builtin_processors.parts.state_history import common_length
from logitship.sampler.allowed_tokens import Words


class GrammarCursor:
    """Follows a sequence's output, and supports removing tokens. A deep copy is independent.

    Forced runs look at masks ahead: tokens are appended, and removed until they are sampled. So masks are cached by
    position, and those of removed tokens serve again if the same tokens follow.

    Args:
        matcher: a matcher at the beginning of the text, which is copied.
        eos_token_ids: the tokens that may follow a complete text.
        after: the text begins when one of these token sequences was sampled; empty if it begins at once.

    Attributes:
        matcher: the matcher at the end of the output.
        num_slow: masks that took long to compute, counted by the caller.
        num_too_slow: masks over its limit, counted by the caller.
    """

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], after: Collection[tuple[int, ...]] = ()
    ) -> None:
        self.matcher = matcher.deep_copy()
        self.num_slow = 0
        self.num_too_slow = 0
        self._eos_token_ids = eos_token_ids
        self._after = after
        self._tokens: list[int] = []
        self._removed: list[int] = []  # tokens that followed, and may follow again
        self._masks: dict[int, Words] = {}  # by the number of tokens before, with those of `_removed`
        self._begin = None if after else 0  # output index at which the text begins
        self._matched = 0  # number of tokens of the text consumed by the matcher
        self._refused: int | None = None  # output index of the first token that does not match

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.matcher = self.matcher.deep_copy()
        copied._tokens, copied._removed = self._tokens.copy(), self._removed.copy()
        copied._masks = self._masks.copy()
        return copied

    @property
    def mask(self) -> Words | None:
        """The mask after the current tokens, cached by the caller; None if it is not computed yet."""
        return self._masks.get(len(self._tokens))

    @mask.setter
    def mask(self, words: Words) -> None:
        self._masks[len(self._tokens)] = words

    @property
    def is_free(self) -> bool:
        """True if the text has not begun, so that all tokens are allowed."""
        return self._begin is None

    @property
    def is_refused(self) -> bool:
        """True if the output can no longer match the grammar, because something else forced a token."""
        return self._refused is not None

    def follow(self, output: Sequence[int]) -> None:
        """Read the new tokens of the sequence's output, in O(new tokens).

        As with `StateHistory`, replaced tokens are detected if there are fewer tokens or the last known one differs.
        """
        known = len(self._tokens)
        if known > len(output) or (known and output[known - 1] != self._tokens[-1]):
            known = common_length(self._tokens, output)
            self.remove(len(self._tokens) - known)
        if known < len(output):
            self._keep_masks(range(known, known + len(self._removed) + 1))
        for token in output[known:]:
            self.read(token)

    def _keep_masks(self, positions: range) -> None:
        self._masks = {position: words for position, words in self._masks.items() if position in positions}

    def read(self, token: int) -> None:
        """Read one more token."""
        if self._removed and self._removed.pop(0) != token:
            self._removed.clear()
            self._keep_masks(range(len(self._tokens) + 1))
        self._tokens.append(token)
        if self._begin is None:
            if any(tuple(self._tokens[-len(marker) :]) == marker for marker in self._after):
                self._begin = len(self._tokens)
        elif self._refused is None and not self._matches(token):
            self._refused = len(self._tokens) - 1

    def _matches(self, token: int) -> bool:
        # A stopped matcher has consumed an EOS token, or allows nothing else. With `ignore_eos`, there may be several.
        if self.matcher.is_stopped():
            return token in self._eos_token_ids
        fits = self.matcher.try_consume_tokens([token]) == 1
        self._matched += fits
        return fits

    def remove(self, count: int) -> None:
        """Remove the last tokens."""
        kept = len(self._tokens) - count
        self._removed = self._tokens[kept:] + self._removed
        del self._tokens[kept:]
        if self._refused is not None and kept <= self._refused:
            self._refused = None
        if self._begin is None:
            return
        matched = max(0, min(self._matched, kept - self._begin))
        if matched < self._matched:
            self.matcher.rollback(self._matched - matched)
            self._matched = matched
        if kept < self._begin:
            self._begin = None
