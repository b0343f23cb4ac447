"""The rules of beam search: selection of the next beams and of the finished outputs, on numbers only.

They are those of Hugging Face's `generate(num_beams=…, do_sample=False)` in transformers 5:

* Each step considers the `num_candidates` continuations with the highest sum of log-probabilities.
* The finished ones among the first `width` of them become hypotheses, of which the best `width` are kept. The score of
  a hypothesis is the sum divided by length ** `length_penalty`, with the length of the output including its EOS token.
* The first `width` unfinished ones become the next beams.
* The search is over when there are no beams, or when there are `width` hypotheses and no beam can be expected to score
  better than the worst of them. The expectation depends on `early_stopping`, see `BeamSearch`.

One difference: a masked continuation (log-probability -inf) never becomes a beam. In transformers it does, with a score
that is worse than any hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .messages import BeamSearch

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A continuation of a beam by one token.

    Attributes:
        beam: index of the beam.
        token_id: the token.
        position: index of the token among the most likely ones of the beam.
        cumulative_logprob: sum of the log-probabilities, including the token's.
    """

    beam: int
    token_id: int
    position: int
    cumulative_logprob: float


@dataclass(frozen=True)
class Selection:
    """The candidates of a step that were selected. Both lists start with the best.

    Attributes:
        running: the next beams.
        finished: the new hypotheses.
    """

    running: list[Candidate]
    finished: list[Candidate]


def rank_candidates(
    cumulative_logprobs: Sequence[float], most_likely: Sequence[Sequence[tuple[int, float]]], count: int
) -> list[Candidate]:
    """Return the best continuations of all beams together, the best first. Among equals, earlier beams come first.

    Args:
        cumulative_logprobs: sum of log-probabilities of each beam.
        most_likely: (token id, log-probability) of each beam's next tokens: the `count` most likely ones, or all.
        count: most candidates to return. Continuations with a log-probability of -inf are never returned.
    """
    candidates = [
        Candidate(beam, token_id, position, cumulative_logprobs[beam] + logprob)
        for beam, tokens in enumerate(most_likely)
        for position, (token_id, logprob) in enumerate(tokens)
        if logprob > -math.inf
    ]
    candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
    return candidates[:count]


def select(candidates: Sequence[Candidate], width: int, ends: Callable[[Candidate], bool]) -> Selection:
    """Divide the candidates into running and finished ones.

    Args:
        candidates: the best first.
        width: number of beams.
        ends: returns whether a candidate finishes its sequence. Only called as far as needed.
    """
    running: list[Candidate] = []
    finished: list[Candidate] = []
    for rank, candidate in enumerate(candidates):
        if rank >= width and len(running) == width:
            break
        if not ends(candidate):
            running.append(candidate)
        elif rank < width:
            finished.append(candidate)
    return Selection(running[:width], finished)


@dataclass(frozen=True)
class Hypothesis(Generic[T]):
    """A finished output.

    Attributes:
        score: see `BeamSearch.score`.
        cumulative_logprob: sum of its log-probabilities.
        output: the output itself.
    """

    score: float
    cumulative_logprob: float
    output: T


class Hypotheses(Generic[T]):
    """The best finished outputs, at most `width`.

    Attributes:
        best: the best first; among equals, the earlier first.
    """

    def __init__(self, search: BeamSearch) -> None:
        self._search = search
        self.best: list[Hypothesis[T]] = []

    def add(self, cumulative_logprob: float, length: int, output: T) -> None:
        """Keep a finished output of `length` tokens, if it is good enough."""
        score = self._search.score(cumulative_logprob, length)
        self.best.append(Hypothesis(score, cumulative_logprob, output))
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self._search.width :]

    def is_final(self, running: Collection[float], length: int, max_length: int) -> bool:
        """Return whether the search is over.

        Args:
            running: sums of log-probabilities of the running beams.
            length: tokens of their outputs.
            max_length: most tokens of an output.
        """
        search = self._search
        if not running:
            return True
        if len(self.best) < search.width:
            return False
        if search.early_stopping is True:
            return True
        if search.early_stopping == "never" and search.length_penalty > 0:
            length = max_length
        return search.score(max(running), length) <= self.best[-1].score
