"""Beam search: which continuations of the beams go on, and which finished ones are kept. Numbers only.

The rules are those of Hugging Face's `generate(num_beams=…, do_sample=False)` in transformers 5:

* Of each step, the `num_candidates` continuations with the highest sum of log-probabilities are looked at.
* Those among the first `width` of them that end are hypotheses: finished sequences, of which the best `width` are kept.
  Their score is the sum divided by length ** `length_penalty`, where the length is that of the output with its end
  token.
* The first `width` of them that do not end are the next beams.
* The search is over when no beam goes on, or no beam can be expected to come to a better score than the worst
  hypothesis of a full pool. What can be expected is up to `early_stopping`, see `BeamSearch`.

One thing is exact here: a continuation that is forbidden (log-probability -inf) never becomes a beam. There it does,
and is dragged along with a score that no hypothesis loses against.
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
"""Of the length penalty, with either sign: far beyond what makes sense, and no output's power of it overflows."""


@dataclass(frozen=True)
class BeamSearch:
    """What a request asks for. The names in errors are those of the request's fields.

    Attributes:
        width: number of beams.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided. Above 0 it is longer
            sequences that gain, since sums are negative.
        early_stopping: when the search stops, once there are `width` hypotheses. True: at once. False: when the best
            beam, if it ended now, would not be better than the worst of them. "never": when it could not be better at
            any length that it may still reach.

    Raises:
        InvalidSamplingParams: a value is out of its range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if not _is_count(self.width):
            raise InvalidSamplingParams("num_beams", "must be an integer, 1 or greater")
        # Written so that NaN is refused too.
        if not -_LARGEST_PENALTY <= self.length_penalty <= _LARGEST_PENALTY:
            raise InvalidSamplingParams(
                "length_penalty", f"must be a number from -{_LARGEST_PENALTY} to {_LARGEST_PENALTY}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidSamplingParams("early_stopping", 'must be true, false or "never"')

    def num_candidates(self, num_end_tokens: int) -> int:
        """How many continuations of a step are looked at: enough for `width` that do not end in an end token."""
        return max(2, 1 + num_end_tokens) * self.width

    def score(self, cumulative_logprob: float, length: int) -> float:
        """What hypotheses are compared by.

        Args:
            cumulative_logprob: sum of the log-probabilities of the output.
            length: tokens of the output, 1 or more.
        """
        return float(cumulative_logprob / length**self.length_penalty)


class BeamFields(Protocol):
    """The fields of a request that ask for beam search, in all APIs; `n` is the number of sequences in the answer."""

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
    """The search that a request asks for, or None.

    With `num_beams` above 1, as in Hugging Face, `n` of the beams are answered. With `use_beam_search` alone, as in
    vLLM, `n` is their number.

    Raises:
        InvalidSamplingParams: a field is out of its range, or makes no sense beside the others.
    """
    if not fields.use_beam_search and fields.num_beams in (None, 1):
        for name, default in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(fields, name) != default:
                raise InvalidSamplingParams(name, "goes with beam search: num_beams above 1, or use_beam_search")
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
        beam: number of the beam.
        token_id: the token.
        place: of the token among the most likely ones of the beam, from 0.
        cumulative_logprob: sum of the log-probabilities, the token's included.
    """

    beam: int
    token_id: int
    place: int
    cumulative_logprob: float


@dataclass(frozen=True)
class Selection:
    """What becomes of a step's candidates. Both lists begin with the best.

    Attributes:
        running: the next beams.
        finished: the new hypotheses.
    """

    running: list[Candidate]
    finished: list[Candidate]


def candidates_of(
    cumulative_logprobs: Sequence[float], most_likely: Sequence[Sequence[tuple[int, float]]], count: int
) -> list[Candidate]:
    """The best continuations of all beams together, the best first. Of equals, those of the first beam come first.

    Args:
        cumulative_logprobs: of each beam.
        most_likely: (token id, log-probability) of each beam's next tokens: the `count` most likely ones, or all.
        count: how many to give at most. Continuations with a log-probability of -inf are never given.
    """
    candidates = [
        Candidate(beam, token_id, place, cumulative_logprobs[beam] + logprob)
        for beam, tokens in enumerate(most_likely)
        for place, (token_id, logprob) in enumerate(tokens)
        if logprob > -math.inf
    ]
    candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
    return candidates[:count]


def select(candidates: Sequence[Candidate], width: int, ends: Callable[[Candidate], bool]) -> Selection:
    """Divide candidates into those that go on and those that end.

    Args:
        candidates: the best first.
        ends: whether a sequence ends with a candidate. Not asked of those that are not needed.
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
    """A finished sequence.

    Attributes:
        score: see `BeamSearch.score`.
        cumulative_logprob: sum of its log-probabilities.
        sequence: the sequence itself.
    """

    score: float
    cumulative_logprob: float
    sequence: T


class Hypotheses(Generic[T]):
    """The best finished sequences, at most `width`.

    Attributes:
        best: the best first; of equals, that which finished first.
    """

    def __init__(self, search: BeamSearch) -> None:
        self._search = search
        self.best: list[Hypothesis[T]] = []

    def add(self, cumulative_logprob: float, length: int, sequence: T) -> None:
        """Keep a finished sequence, if it is good enough.

        Args:
            length: tokens of its output.
        """
        score = self._search.score(cumulative_logprob, length)
        self.best.append(Hypothesis(score, cumulative_logprob, sequence))
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self._search.width :]

    def is_final(self, running: Collection[float], length: int, max_length: int) -> bool:
        """Whether the search is over.

        Args:
            running: sums of log-probabilities of the beams that go on.
            length: tokens of their outputs.
            max_length: tokens that an output may have.
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
