"""No n-gram twice within a sliding window of the history.

The parameters, the class name and the behaviour on every history are SGLang's, which has them from DeepSeek-OCR. SGLang
compares every n-gram of the window in each step; here a step reads the tokens that are new, and looks the last n - 1 up
in an index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from logitship.client.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .params import Count, ProcessorParams, TokenIds
from .parts.row_edits import forbid_tokens, on_device


class NoRepeatNGramParams(ProcessorParams):
    """See `DeepseekOCRNoRepeatNGramLogitProcessor`."""

    ngram_size: Count
    """n, in tokens. 0: nothing is banned."""
    window_size: Count
    """How many of the last tokens are searched. 0: nothing is banned."""
    whitelist_token_ids: TokenIds | None = None
    """Tokens that may always repeat."""


class DeepseekOCRNoRepeatNGramLogitProcessor(BuiltinProcessor):
    """Sets to -inf each token that would repeat an n-gram of the last `window_size` tokens of prompt and output.

    An n-gram counts if all of it lies in the window, so a window shorter than `ngram_size` bans nothing. Tokens in
    `whitelist_token_ids` are never banned.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "DeepseekOCRNoRepeatNGramLogitProcessor")

    name = "no_repeat_ngram"
    Params = NoRepeatNGramParams
    is_mask = True

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Ban each row's repeating tokens, in place, with one write for all rows."""
        rows: list[int] = []
        columns: list[int] = []
        for row, params in enumerate(custom_param_list or ()):
            banned = _banned_tokens(params)
            rows += [row] * len(banned)
            columns += banned
        if rows:
            forbid_tokens(logits, on_device(rows, columns, logits.device))
        return logits


def _banned_tokens(params: Mapping[str, Any]) -> set[int]:
    ngram_size, window_size = params.get("ngram_size") or 0, params.get("window_size") or 0
    if not 0 < ngram_size <= window_size:
        return set()
    request = params["__req__"]
    key = f"no_repeat_ngram:{ngram_size}:{window_size}"
    index: NGramIndex | None = request.state.get(key)
    if index is None:
        index = request.state[key] = NGramIndex(ngram_size, window_size)
    index.follow(request.origin_input_ids, request.output_ids)
    return index.followers().difference(params.get("whitelist_token_ids") or ())


class NGramIndex:
    """The n-grams in the window at the end of one token sequence, by their first n - 1 tokens.

    As in a Lempel-Ziv compressor (Deutsch 1996, RFC 1951, section 4), a table has the last n-gram with each prefix, and
    each n-gram the one before it with the same prefix.

    Assumptions:
    * Tokens are only appended and taken back, and between two calls not both.

    Guarantees:
    * `follow` costs O(n) for each token that came or was taken back, and `followers` for each that it finds.
    * The table holds what is in the window, however long the sequence is.

    Args:
        ngram_size: n, at least 1.
        window_size: in tokens, at least n.
    """

    def __init__(self, ngram_size: int, window_size: int) -> None:
        self._size = ngram_size
        self._window_size = window_size
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """prefix → position of the last n-gram in the window that begins with it."""
        self._previous: list[int] = []
        """For the n-gram at each position: the position of the last one before it with the same prefix, as long as that
        may be in the window."""

    def __len__(self) -> int:
        """Number of different prefixes in the window."""
        return len(self._last)

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Make it the index of prompt + output."""
        length, known = len(prompt) + len(output), len(self._tokens)
        if length < known:
            self._take_back(length)
        elif length > known:
            self._tokens += [*prompt[known:], *output[max(0, known - len(prompt)) :]]
            for position in range(len(self._previous), length - self._size + 1):
                self._add(position)
                # One by one, so that the table never becomes larger than the window, which would make it slow.
                self._forget(position + self._size - self._window_size - 1)

    def followers(self) -> set[int]:
        """The tokens that followed the sequence's last n - 1 tokens in the window."""
        tokens: set[int] = set()
        length = len(self._tokens)
        if length < self._size:
            return tokens
        start = self._window_start(length)
        position = self._last.get(self._prefix(length - self._size + 1), -1)
        while position >= start:
            tokens.add(self._tokens[position + self._size - 1])
            position = self._previous[position]
        return tokens

    def _prefix(self, position: int) -> tuple[int, ...]:
        return tuple(self._tokens[position : position + self._size - 1])

    def _add(self, position: int) -> None:
        prefix = self._prefix(position)
        self._previous.append(self._last.get(prefix, -1))
        self._last[prefix] = position

    def _forget(self, position: int) -> None:
        if position >= 0 and self._last[prefix := self._prefix(position)] == position:
            del self._last[prefix]

    def _take_back(self, length: int) -> None:
        old_start, start = self._window_start(len(self._tokens)), self._window_start(length)
        while len(self._previous) > max(0, length - self._size + 1):
            prefix = self._prefix(len(self._previous) - 1)
            previous = self._previous.pop()
            if previous >= 0:
                self._last[prefix] = previous
            else:
                self._last.pop(prefix, None)
        # What the window had left behind comes back into it.
        for position in reversed(range(start, min(old_start, len(self._previous)))):
            self._last.setdefault(self._prefix(position), position)
        del self._tokens[length:]

    def _window_start(self, length: int) -> int:
        return max(0, length - self._window_size)
