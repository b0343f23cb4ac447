"""A grammar's matcher along the output of one sequence."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from logitship.builtin_processors.parts.state_history import common_length

Words = npt.NDArray[np.int32]
"""A mask: bit `i % 32` of word `i // 32` is set if token `i` may be drawn."""


class GrammarCursor:
    """Follows a sequence's output, also when tokens are taken back. A deep copy goes its own way.

    Args:
        matcher: at the beginning of the text; is copied.
        eos_token_ids: what may follow a complete text.
        after: the text begins when one of these sequences of tokens is drawn; empty: it begins at once.

    Attributes:
        mask: what `fill` of the current state gave, to be kept here by whoever fills; None: not filled yet.
    """

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], after: Collection[tuple[int, ...]] = ()
    ) -> None:
        self.matcher = matcher.deep_copy()
        self.mask: Words | None = None
        self._eos_token_ids = eos_token_ids
        self._after = after
        self._tokens: list[int] = []
        self._begin = None if after else 0  # where in the output the text begins
        self._matched = 0  # tokens of the text that the matcher has read
        self._refused: int | None = None  # where in the output the first token stands that does not fit

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = copy.copy(self)
        twin.matcher = self.matcher.deep_copy()
        twin._tokens = list(self._tokens)
        return twin

    @property
    def is_free(self) -> bool:
        """The text has not begun: any token may be drawn."""
        return self._begin is None

    @property
    def is_refused(self) -> bool:
        """The output does not fit the grammar, whatever may follow. Something else must have forced a token."""
        return self._refused is not None

    def follow(self, output: Sequence[int]) -> None:
        """Read what is new in the sequence's output, in O(new tokens).

        As with `StateHistory`, tokens that were both taken back and drawn anew since the last call are noticed if there
        are fewer now or the last known one differs.
        """
        known = len(self._tokens)
        if known > len(output) or (known and output[known - 1] != self._tokens[-1]):
            known = common_length(self._tokens, output)
            self._take_back(known)
        for token in output[known:]:
            self._read(token)

    def _read(self, token: int) -> None:
        self._tokens.append(token)
        self.mask = None
        if self._begin is None:
            if any(tuple(self._tokens[-len(marker) :]) == marker for marker in self._after):
                self._begin = len(self._tokens)
        elif self._refused is None and not self._fits(token):
            self._refused = len(self._tokens) - 1

    def _fits(self, token: int) -> bool:
        # Stopped, it has read an end token or takes nothing but one. There may be more of them: `ignore_eos`.
        if self.matcher.is_stopped():
            return token in self._eos_token_ids
        fits = self.matcher.try_consume_tokens([token]) == 1
        self._matched += fits
        return fits

    def _take_back(self, kept: int) -> None:
        """Forget all tokens but the first ones."""
        del self._tokens[kept:]
        self.mask = None
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
