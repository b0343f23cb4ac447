"""Guesses what a sequence goes on with: what followed the last time that its last tokens stood there.

Summaries, edits and answers with quotations repeat long parts of their prompts. Saxena 2023, "Prompt Lookup Decoding",
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Final

_SIZES: Final = (4, 2)
"""Lengths of the n-grams that are looked up, the longer first: what follows more tokens is the better guess."""
_FIRST_RATES: Final = {4: 0.5, 2: 0.25}
_FURTHER_RATE: Final = 0.8
"""Hit rates before anything is known of a model's texts."""
_PRIME: Final = (1 << 61) - 1
_FACTORS: Final = [secrets.randbelow(_PRIME - 1) + 1 for _ in range(max(_SIZES))]
"""Of the n-grams' keys: nobody can send tokens that all have the same."""


class AcceptanceRate:
    """How often guesses came true of late: an exponential mean.

    Attributes:
        value: between 0 and 1.
    """

    def __init__(self, value: float, weight: float) -> None:
        self.value = value
        self._weight = weight

    def count(self, hit: bool) -> None:
        """A guess came true, or not."""
        self.value += self._weight * (hit - self.value)


class AcceptanceRates:
    """Those of one sequence, or of all.

    Args:
        first: by length of n-gram.

    Attributes:
        first: of guesses just after an n-gram of a length was found.
        further: of guesses after a guess that came true.
    """

    def __init__(
        self, first: Mapping[int, float] = _FIRST_RATES, further: float = _FURTHER_RATE, weight: float = 1 / 64
    ) -> None:
        self.first = {size: AcceptanceRate(value, weight) for size, value in first.items()}
        self.further = AcceptanceRate(further, weight)

    def of_sequence(self) -> AcceptanceRates:
        """What is expected of one more sequence: the same, until it has guesses of its own."""
        return AcceptanceRates(
            {size: rate.value for size, rate in self.first.items()}, self.further.value, weight=1 / 8
        )

    def of_guess(self, size: int | None) -> AcceptanceRate:
        """The one that a guess belongs to: just after an n-gram of a length, or after a guess that came true (None)."""
        return self.further if size is None else self.first[size]


class PromptLookup:
    """Follows one sequence, O(1) for each token.

    Every token is guessed before it is seen, whether anybody uses the guess or not: so the hit rates cost nothing, and
    are right also where nothing is drafted.

    Args:
        of_all: the hit rates of all sequences, which this one begins with and adds to.
    """

    def __init__(self, prompt_token_ids: list[int], output_token_ids: list[int], of_all: AcceptanceRates) -> None:
        self._output = output_token_ids
        self._tokens = list(prompt_token_ids)
        self._num_prompt = len(prompt_token_ids)
        self._following: dict[int, int] = {}
        """Key of an n-gram → where the token stands that last followed it."""
        self._guess: int | None = None
        """Where the token stands that is expected to be the next one."""
        self._size: int | None = None
        """Of the n-gram that the guess follows; None after a guess that came true."""
        self._of_all = of_all
        self._own = of_all.of_sequence()
        for end in range(1, len(self._tokens)):
            self._index(end)
        self._look_up()

    def follow(self) -> None:
        """Take over the tokens that came."""
        for token in islice(self._output, len(self._tokens) - self._num_prompt, None):
            self._append(token)

    def probability(self, place: int) -> float:
        """That the draft's token at a place, and all before it, come true; 0 if there is no draft."""
        if self._guess is None:
            return 0.0
        return float(self._own.of_guess(self._size).value * self._own.further.value**place)

    def draft(self, count: int) -> list[int]:
        """The next tokens, as guessed. None if nothing like the last tokens stood there before.

        What follows behind the end is guessed to repeat.
        """
        if self._guess is None:
            return []
        known = self._tokens[self._guess : self._guess + count]
        while len(known) < count:
            known.append(known[len(known) - (len(self._tokens) - self._guess)])
        return known

    def _append(self, token: int) -> None:
        if self._guess is not None:
            hit = self._tokens[self._guess] == token
            for rates in (self._own, self._of_all):
                rates.of_guess(self._size).count(hit)
            self._size = None
            self._guess = self._guess + 1 if hit else None
        self._tokens.append(token)
        self._index(len(self._tokens) - 1)
        if self._guess is None:
            self._look_up()

    def _index(self, place: int) -> None:
        """Remember what the token at a place follows."""
        for size in _SIZES:
            if place >= size:
                self._following[self._key(place, size)] = place

    def _look_up(self) -> None:
        end = len(self._tokens)
        for size in _SIZES:
            if end >= size and (place := self._following.get(self._key(end, size))) is not None:
                self._guess, self._size = place, size
                return

    def _key(self, end: int, size: int) -> int:
        """Of the n-gram before a place. Two that differ have the same one with a probability of 2^-61."""
        key = size
        for token, factor in zip(self._tokens[end - size : end], _FACTORS, strict=False):
            key += (token + 1) * factor
        return key % _PRIME
