"""Bans repeated n-grams within a sliding window of the history.

Parameters, class name and behavior are those of SGLang, which took them from DeepSeek-OCR. SGLang compares all n-grams
of the window in each step; here, a step reads the new tokens only, and looks up the last n - 1 tokens in an index.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from logitship.builtin_processors.parts.row_edits import forbid_tokens
from logitship.builtin_processors.parts.state_history import kept_length
from logitship.client.serialization.shipped_names import SGLANG_MODULE
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.device_tensor import copies_to, token_positions
from logitship.sampler.processors.executor import PREPARED_KEY

from .base import BuiltinProcessor
from .params import Count, ModelFacts, ProcessorParams, TokenIds


class NoRepeatNGramParams(ProcessorParams):
    """See `DeepseekOCRNoRepeatNGramLogitProcessor`."""

    ngram_size: Count
    """n, in tokens. 0: nothing is banned."""
    window_size: Count
    """Number of last tokens to search. 0: nothing is banned."""
    whitelist_token_ids: TokenIds | None = None
    """Tokens that may always repeat."""


class DeepseekOCRNoRepeatNGramLogitProcessor(BuiltinProcessor):
    """Sets to -inf each token that would repeat an n-gram of the last `window_size` tokens of prompt and output.

    An n-gram counts if all of it is in the window, so a window shorter than `ngram_size` bans nothing. Tokens in
    `whitelist_token_ids` are never banned.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "DeepseekOCRNoRepeatNGramLogitProcessor")

    name = "no_repeat_ngram"
    Params = NoRepeatNGramParams
    example: ClassVar[Mapping[str, Any]] = {"ngram_size": 2, "window_size": 9}
    is_mask = True

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> NGramBan:
        """See `BuiltinProcessor.prepare`."""
        return NGramBan.of(dict(NoRepeatNGramParams.read(params, model)))

    def prepared(self, params: dict[str, Any]) -> NGramBan:
        """Return the ban of a row. Parameters not validated at admission are interpreted as in SGLang."""
        ban: NGramBan | None = params.get(PREPARED_KEY)
        return ban or NGramBan.of(params)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Ban each row's repeating tokens, in place, with one write for all rows."""
        banned: dict[int, npt.NDArray[np.int64]] = {}
        for row, params in enumerate(custom_param_list or ()):
            tokens = self.prepared(params).tokens(params["__req__"])
            tokens = tokens[tokens < logits.shape[1]]  # SGLang puts larger numbers where an image is
            if len(tokens):
                banned[row] = tokens
        if banned:
            to_device = copies_to(logits.device)
            forbid_tokens(logits, token_positions(banned, to_device))
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            each.forbid(self.prepared(params).tokens(params["__req__"]).tolist())


@dataclass(frozen=True, eq=False)
class NGramBan:
    """The request's parameters; see `NoRepeatNGramParams`."""

    ngram_size: int
    window_size: int
    whitelist: frozenset[int]

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Build from parameters; missing ones may also be None. Invalid sizes ban nothing."""
        try:
            ngram_size, window_size = int(params.get("ngram_size") or 0), int(params.get("window_size") or 0)
        except (TypeError, ValueError):
            ngram_size = window_size = 0
        try:
            whitelist = frozenset(map(int, params.get("whitelist_token_ids") or ()))
        except (TypeError, ValueError):
            whitelist = frozenset()
        return cls(ngram_size, window_size, whitelist)

    def tokens(self, request: Any) -> npt.NDArray[np.int64]:
        """Return the tokens that are banned after a history, int64 [any].

        Args:
            request: a row's `__req__`.
        """
        if not 0 < self.ngram_size <= self.window_size:
            return _NO_TOKENS
        key = f"no_repeat_ngram:{self.ngram_size}:{self.window_size}"
        index: NGramIndex | None = request.state.get(key)
        if index is None:
            index = request.state[key] = NGramIndex(self.ngram_size, self.window_size)
        index.follow(request.origin_input_ids, request.output_ids)
        found = index.followers()
        return np.fromiter(found - self.whitelist if self.whitelist else found, dtype=np.int64)


_NO_TOKENS = np.empty(0, dtype=np.int64)
_PRIME = (1 << 61) - 1
_BASE = secrets.randbelow(_PRIME - 1) + 1
"""Base of the fingerprints. Random, so that clients cannot construct collisions."""


class NGramIndex:
    """Index of the n-grams in the window at the end of a token sequence, by their first n - 1 tokens (the prefix).

    n may be as large as the window, so storing the tokens of a prefix would take n times the memory of the sequence.
    Instead, the index stores its fingerprint (Karp and Rabin 1987, "Efficient randomized pattern-matching algorithms"):
    the tokens are the digits of a number in base `_BASE`, modulo 2^61 - 1. The fingerprint of any part is computed from
    those of the beginnings of the sequence. Two different prefixes of n tokens collide with probability n / 2^61.

    Assumptions:
    * Tokens are only appended and removed at the end. If both happen between two calls, that is detected if the last
      known token has changed.

    Guarantees:
    * `follow` costs O(1) per appended or removed token, and O(tokens) when it detects replaced tokens; `followers`
      costs O(1).
    * The table only holds the n-grams of the window, however long the sequence is.

    Args:
        ngram_size: n, at least 1.
        window_size: in tokens, at least n.
    """

    def __init__(self, ngram_size: int, window_size: int) -> None:
        self._size = ngram_size
        self._window_size = window_size
        self._tokens: list[int] = []
        self._fingerprints = [0]
        """At [k]: the fingerprint of the first k tokens."""
        self._shift = pow(_BASE, ngram_size - 1, _PRIME)
        self._covered = range(0)
        """Positions of the n-grams in the table."""
        self._table: dict[int, int | dict[int, int]] = {}
        """Fingerprint of a prefix → the token that follows it or, for a repeated prefix, the count of each following
        token. Most prefixes occur once, and a dictionary for each would exceed the CPU cache."""

    def __len__(self) -> int:
        """Return the number of distinct prefixes in the window."""
        return len(self._table)

    def __deepcopy__(self, memo: dict[int, Any]) -> NGramIndex:
        copied = copy.copy(self)
        copied._tokens, copied._fingerprints = self._tokens.copy(), self._fingerprints.copy()
        copied._table = {
            prefix: following.copy() if isinstance(following, dict) else following
            for prefix, following in self._table.items()
        }
        return copied

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Update the index to prompt + output."""
        length, kept = len(prompt) + len(output), kept_length(self._tokens, prompt, output)
        if kept < len(self._tokens):
            self._cover(kept)
            del self._tokens[kept:], self._fingerprints[kept + 1 :]
        if kept < length:
            new = [*prompt[kept:], *output[max(0, kept - len(prompt)) :]]
            self._tokens += new
            self._fingerprints += islice(accumulate(new, _fingerprint, initial=self._fingerprints[-1]), 1, None)
            self._cover(length)

    def followers(self) -> Set[int]:
        """Return the tokens that followed the sequence's last n - 1 tokens in the window. Read-only."""
        position = len(self._tokens) - self._size + 1
        following = self._table.get(self._prefix(position)) if self._covered else None
        if following is None:
            return _NO_FOLLOWERS
        return following.keys() if isinstance(following, dict) else {following}

    def _cover(self, length: int) -> None:
        """Update the table to the window at the end of the first `length` tokens, which are known."""
        new = range(max(0, length - self._window_size), max(0, length - self._size + 1))
        old, self._covered = self._covered, new
        for position in (*range(old.start, min(old.stop, new.start)), *range(max(old.start, new.stop), old.stop)):
            self._remove(position)
        for position in (*range(new.start, min(new.stop, old.start)), *range(max(new.start, old.stop), new.stop)):
            self._add(position)

    def _add(self, position: int) -> None:
        prefix, token = self._prefix(position), self._tokens[position + self._size - 1]
        following = self._table.get(prefix)
        if following is None:
            self._table[prefix] = token
            return
        if not isinstance(following, dict):
            following = self._table[prefix] = {following: 1}
        following[token] = following.get(token, 0) + 1

    def _remove(self, position: int) -> None:
        prefix, token = self._prefix(position), self._tokens[position + self._size - 1]
        following = self._table[prefix]
        if isinstance(following, dict):
            following[token] -= 1
            if not following[token]:
                del following[token]
        if not isinstance(following, dict) or not following:
            del self._table[prefix]

    def _prefix(self, position: int) -> int:
        """Return the fingerprint of the n - 1 tokens from a position on."""
        before, until = self._fingerprints[position], self._fingerprints[position + self._size - 1]
        return (until - before * self._shift) % _PRIME


_NO_FOLLOWERS: frozenset[int] = frozenset()


def _fingerprint(before: int, token: int) -> int:
    """Return the fingerprint after another token."""
    return (before * _BASE + token) % _PRIME
