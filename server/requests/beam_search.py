"""The rules of beam search: selection of the next beams and of the finished outputs, on numbers only.

They are those of Hugging Face's `generate(num_beams=…, do_sample=False)` in transformers 5:

* Each step considers the `num_candidates` continuations with the highest sum of log-probabilities.
* The finished ones among the first `width` of them become hypotheses, of which the best `width` are kept. The score of
  a hypothesis is the sum divided by length ** `length_penalty`, with the length of the output including its end token.
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
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from logitship.sampler.sampling_params import InvalidSamplingParams

T = TypeVar("T")

EarlyStopping: TypeAlias = bool | Literal["never"]

_LARGEST_PENALTY = 10
"""Largest absolute length penalty: far beyond useful values, and no length to that power overflows."""


@dataclass(frozen=True)
class BeamSearch:
    """Parameters of a beam search. Errors use the names of the request's fields.

    Attributes:
        width: number of beams.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided. Values above 0 favor
            longer outputs, since the sums are negative.
        early_stopping: when the search stops, once there are `width` hypotheses. True: at once. False: when the best
            beam, if it ended now, would not be better than the worst of them. "never": when it could not become better
            at any length that it can still reach.

    Raises:
        InvalidSamplingParams: a value is out of range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if not _is_count(self.width):
            raise InvalidSamplingParams("num_beams", "must be an integer, 1 or greater")
        # In this form, it also refuses NaN.
        if not -_LARGEST_PENALTY <= self.length_penalty <= _LARGEST_PENALTY:
            raise InvalidSamplingParams(
                "length_penalty", f"must be a number from -{_LARGEST_PENALTY} to {_LARGEST_PENALTY}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidSamplingParams("early_stopping", 'must be true, false or "never"')

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return how many candidates a step considers: at least `width` of them do not end in an end token."""
        return max(2, 1 + num_end_tokens) * self.width

    def score(self, cumulative_logprob: float, length: int) -> float:
        """Return the score that hypotheses are ranked by.

        Args:
            cumulative_logprob: sum of the log-probabilities of the output.
            length: tokens of the output, 1 or more.
        """
        return float(cumulative_logprob / length**self.length_penalty)


class BeamFields(Protocol):
    """The fields of a request that select beam search, in all APIs; `n` is the number of outputs in the answer."""

    @property
    def n(self) -> int:  # noqa: D102
        ...

    @property
    def num_beams(self) -> int | None:  # noqa: D102
        ...

    @property
    def use_beam_search(self) -> bool:  # noqa: D102
        ...

    @property
    def length_penalty(self) -> float:  # noqa: D102
        ...

    @property
    def early_stopping(self) -> EarlyStopping:  # noqa: D102
        ...


def beam_search_of(fields: BeamFields) -> BeamSearch | None:
    """Return the search that a request asks for, or None.

    With `num_beams` above 1, as in Hugging Face, the answer has `n` of the beams. With `use_beam_search` alone, as in
    vLLM, `n` is the number of beams.

    Raises:
        InvalidSamplingParams: a field is out of range, or contradicts another one.
    """
    if not fields.use_beam_search and fields.num_beams in (None, 1):
        for name, default in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(fields, name) != default:
                raise InvalidSamplingParams(name, "needs beam search: set num_beams above 1, or use_beam_search")
        return None
    search = BeamSearch(
        fields.n if fields.num_beams is None else fields.num_beams, fields.length_penalty, fields.early_stopping
    )
    if fields.n > search.width:
        raise InvalidSamplingParams("n", f"must not be greater than num_beams, which is {search.width}")
    return search


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


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
