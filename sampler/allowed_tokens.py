"""The tokens that a row may sample next, as far as they are known before its logits exist.

What the history decides, such as a grammar, a tree or a spent budget, is known before the model computes. If it leaves
one token, that token is next whatever the logits are: it is *forced*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""A mask: bit `i % 32` of word `i // 32` is set if token `i` is allowed."""

MAX_EDITED = 1e30
"""Number that may be added to logits, or that they may be multiplied with, without their exceeding float32's range."""


class AllowedTokens:
    """The tokens that one row may sample next. All of the vocabulary, until some are forbidden.

    Args:
        vocab_size: size of the vocabulary.
        may_guess: False if a mask is wanted even where a guess costs less.

    Attributes:
        likely: tokens that probably come next, in order: a guess, which the logits may contradict.
        keeps_order: False if an edit may make another of the tokens that are left the most likely one.
    """

    def __init__(self, vocab_size: int, *, may_guess: bool = True) -> None:
        self.likely: Sequence[int] = ()
        self.may_guess = may_guess
        self.keeps_order = True
        self._vocab_size = vocab_size
        self._is_open = False
        self._only: set[int] | None = None
        self._masks: list[Words] = []
        self._forbidden: set[int] = set()

    def keep(self, token_ids: Iterable[int]) -> None:
        """Forbid all tokens but these."""
        kept = set(token_ids)
        self._only = kept if self._only is None else self._only & kept

    def keep_mask(self, words: Words) -> None:
        """Forbid the tokens that are not set in a mask, int32 [at least vocab / 32], which is not edited later."""
        self._masks.append(words[: (self._vocab_size + 31) >> 5])

    def forbid(self, token_ids: Iterable[int]) -> None:
        """Forbid tokens."""
        self._forbidden.update(token_ids)

    def edit_values(self) -> None:
        """Note that logits of tokens that are left are edited, but stay finite."""
        self.keeps_order = False

    def leave_open(self) -> None:
        """Leave the decision to the logits: something that uses their values, or may overflow, edits the row."""
        self._is_open = True

    def expect(self, token_ids: Sequence[int]) -> None:
        """Leave the decision to the logits, and guess the tokens that come next, in order."""
        self.leave_open()
        self.likely = self.likely or token_ids

    def single(self) -> int | None:
        """Return the only token that is left; None if there are more, or none, or if the logits decide."""
        left = self.at_most(1)
        return left[0] if left else None

    def at_most(self, count: int) -> list[int] | None:
        """Return the tokens that are left; None if they are more, or if the logits decide."""
        if self._is_open:
            return None
        candidates = self._masked(count) if self._only is None else self._only
        if candidates is None:
            return None
        left = [*islice(filter(self._is_left, candidates), count + 1)]
        return left if len(left) <= count else None

    def _is_left(self, token: int) -> bool:
        if token in self._forbidden or not 0 <= token < self._vocab_size:
            return False
        return all(int(words[token >> 5]) >> (token & 31) & 1 for words in self._masks)

    def _masked(self, count: int) -> list[int] | None:
        """Return the tokens that all masks allow; None if they are so many that more than `count` are left."""
        if not self._masks:
            return None
        words = reduce(np.bitwise_and, self._masks)
        used = words.nonzero()[0]
        # One word for each token that is forbidden otherwise, one for the end of the vocabulary, and for what is left.
        if len(used) > len(self._forbidden) + 1 + count:
            return None
        return [32 * place + bit for place in used.tolist() for bit in range(32) if int(words[place]) >> bit & 1]


def mask_of(token_ids: Collection[int] | npt.NDArray[np.int64], vocab_size: int) -> Words:
    """Return the mask of some tokens below the size of the vocabulary, int32 [ceil(vocab / 32)]."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
    if not isinstance(token_ids, np.ndarray):
        token_ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class DecidesTokens(Protocol):
    """A batch processor that can tell from the history of a row what it will forbid, before there are logits."""

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """Forbid what the next `apply` would set to -inf, given the current tokens of the live output list.

        Its other edits must leave finite logits finite, and those at -inf as they are; else it leaves the row open. If
        they may change which logit is the largest, it calls `edit_values`.
        """
        ...


def decides_tokens(processor: Any) -> bool:
    """Return whether a batch processor implements `DecidesTokens`."""
    return hasattr(processor, "restrict")
