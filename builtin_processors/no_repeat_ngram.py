"""No n-gram twice within a sliding window of the history.

The parameters, the class name and the behaviour on every history are SGLang's, which has them from DeepSeek-OCR. SGLang
compares every n-gram of the window in each step; here a step reads the tokens that are new, in an index of the
occurrences of each prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from logitship.client.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .params import Count, ProcessorParams, TokenIds


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

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Ban each row's repeating tokens, in place, with one write for all rows."""
        rows: list[int] = []
        columns: list[int] = []
        for row, params in enumerate(custom_param_list or ()):
            banned = _banned_tokens(params)
            rows += [row] * len(banned)
            columns += banned
        if rows:
            logits[rows, columns] = -torch.inf
        return logits


def _banned_tokens(params: Mapping[str, Any]) -> set[int]:
    ngram_size, window_size = params.get("ngram_size") or 0, params.get("window_size") or 0
    if ngram_size <= 0 or window_size <= 0:
        return set()
    request = params["__req__"]
    index = _index(request.state, ngram_size)
    prefix = index.follow(request.origin_input_ids, request.output_ids)
    window_start = len(request.origin_input_ids) + len(request.output_ids) - window_size
    banned = index.followers(prefix, since=window_start)
    return banned.difference(params.get("whitelist_token_ids") or ())


def _index(state: dict[str, Any], ngram_size: int) -> NGramIndex:
    key = f"no_repeat_ngram:{ngram_size}"
    if key not in state:
        state[key] = NGramIndex(ngram_size)
    index: NGramIndex = state[key]
    return index


class NGramIndex:
    """The n-grams of one growing token sequence, by their first n - 1 tokens.

    Guarantees: `follow` costs O(tokens since the last call + n), also when tokens were taken back; `followers` costs
    O(occurrences of the prefix in the window).
    """

    def __init__(self, ngram_size: int) -> None:
        self._size = ngram_size
        self._occurrences: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """prefix -> (position of the n-gram, its last token), by ascending position."""
        self._ngrams: list[list[tuple[int, int]]] = []
        """For the n-gram at each position, the list in `_occurrences` that it was added to: where to take it back."""

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
        """Add what is new in prompt + output, drop what is no longer there, return the last n - 1 tokens."""
        count = max(0, len(prompt) + len(output) - self._size + 1)
        while len(self._ngrams) > count:
            self._ngrams.pop().pop()
        first = len(self._ngrams)
        tail = [*prompt[first:], *output[max(0, first - len(prompt)) :]]
        for position in range(first, count):
            *prefix, token = tail[position - first : position - first + self._size]
            occurrences = self._occurrences.setdefault(tuple(prefix), [])
            occurrences.append((position, token))
            self._ngrams.append(occurrences)
        return tuple(tail[count - first :])

    def followers(self, prefix: tuple[int, ...], *, since: int) -> set[int]:
        """The tokens that followed `prefix` in n-grams at position `since` or later."""
        tokens = set()
        for position, token in reversed(self._occurrences.get(prefix, ())):
            if position < since:
                break
            tokens.add(token)
        return tokens
