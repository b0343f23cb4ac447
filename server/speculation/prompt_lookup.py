"""Prompt lookup: drafts the tokens that followed the previous occurrence of a sequence's last tokens.

Summaries, edits and answers with quotations repeat long parts of their prompts. Saxena 2023, "Prompt Lookup Decoding",
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Final

_SIZES: Final = (4, 2)
"""Lengths of the n-grams that are looked up, longest first: a longer match predicts better."""
_FIRST_RATES: Final = {4: 0.5, 2: 0.25}
_FURTHER_RATE: Final = 0.8
"""Initial acceptance rates, before the first observations."""
_PRIME: Final = (1 << 61) - 1
_FACTORS: Final = [secrets.randbelow(_PRIME - 1) + 1 for _ in range(max(_SIZES))]
"""Random factors of the n-grams' keys, so that clients cannot make keys collide."""


class AcceptanceRate:
    """Acceptance rate of recent predictions: an exponential mean.

    Attributes:
        value: between 0 and 1.
    """

    def __init__(self, value: float, weight: float) -> None:
        self.value = value
        self._weight = weight

    def count(self, accepted: bool) -> None:
        """Count a prediction that was accepted or not."""
        self.value += self._weight * (accepted - self.value)


class AcceptanceRates:
    """Acceptance rates of one sequence, or of all sequences.

    Args:
        first: initial rates by length of the n-gram.
        further: initial rate of `further`.
        weight: weight of a prediction in the exponential means.

    Attributes:
        first: rates of the first prediction after an n-gram was found, by its length.
        further: rate of predictions after an accepted one.
    """

    def __init__(
        self, first: Mapping[int, float] = _FIRST_RATES, further: float = _FURTHER_RATE, weight: float = 1 / 64
    ) -> None:
        self.first = {size: AcceptanceRate(value, weight) for size, value in first.items()}
        self.further = AcceptanceRate(further, weight)

    def new_sequence(self) -> AcceptanceRates:
        """Return the rates of a new sequence: initially the same, with a larger weight for its own predictions."""
        return AcceptanceRates(
            {size: rate.value for size, rate in self.first.items()}, self.further.value, weight=1 / 8
        )

    def rate_of(self, size: int | None) -> AcceptanceRate:
        """Return the rate of a prediction: after an n-gram of this length, or after an accepted prediction (None)."""
        return self.further if size is None else self.first[size]


class PromptLookup:
    """Predicts the next tokens of one sequence, O(1) for each token.

    Every token is predicted, drafted or not, so the acceptance rates are up to date also while nothing is drafted.

    Args:
        prompt_token_ids: the prompt.
        output_token_ids: the sequence's live list of output tokens.
        shared: the acceptance rates of all sequences: initial rates of this one, and updated by it.
    """

    def __init__(self, prompt_token_ids: list[int], output_token_ids: list[int], shared: AcceptanceRates) -> None:
        self._output = output_token_ids
        self._tokens = list(prompt_token_ids)
        self._num_prompt = len(prompt_token_ids)
        self._following: dict[int, int] = {}
        """Key of an n-gram → index of the token that last followed it."""
        self._predicted: int | None = None
        """Index of the token that is predicted to be repeated next."""
        self._size: int | None = None
        """Length of the n-gram before the prediction; None after an accepted prediction."""
        self._shared = shared
        self._rates = shared.new_sequence()
        for end in range(1, len(self._tokens)):
            self._index(end)
        self._find_ngram()

    def follow(self) -> None:
        """Append the new output tokens."""
        for token in islice(self._output, len(self._tokens) - self._num_prompt, None):
            self._append(token)

    def probability(self, index: int) -> float:
        """Return the probability that the first `index + 1` draft tokens are accepted; 0 if there is no draft."""
        if self._predicted is None:
            return 0.0
        return float(self._rates.rate_of(self._size).value * self._rates.further.value**index)

    def draft(self, count: int) -> list[int]:
        """Return `count` predicted tokens. Empty if the last tokens did not occur before.

        Beyond the end of the sequence, the predicted tokens repeat.
        """
        if self._predicted is None:
            return []
        known = self._tokens[self._predicted : self._predicted + count]
        while len(known) < count:
            known.append(known[len(known) - (len(self._tokens) - self._predicted)])
        return known

    def _append(self, token: int) -> None:
        if self._predicted is not None:
            accepted = self._tokens[self._predicted] == token
            for rates in (self._rates, self._shared):
                rates.rate_of(self._size).count(accepted)
            self._size = None
            self._predicted = self._predicted + 1 if accepted else None
        self._tokens.append(token)
        self._index(len(self._tokens) - 1)
        if self._predicted is None:
            self._find_ngram()

    def _index(self, index: int) -> None:
        """Index the n-grams before the token at an index."""
        for size in _SIZES:
            if index >= size:
                self._following[self._key(index, size)] = index

    def _find_ngram(self) -> None:
        end = len(self._tokens)
        for size in _SIZES:
            if end >= size and (index := self._following.get(self._key(end, size))) is not None:
                self._predicted, self._size = index, size
                return

    def _key(self, end: int, size: int) -> int:
        """Return the key of the n-gram before `end`. Different n-grams have the same key with probability 2^-61."""
        key = size
        for token, factor in zip(self._tokens[end - size : end], _FACTORS, strict=False):
            key += (token + 1) * factor
        return key % _PRIME
