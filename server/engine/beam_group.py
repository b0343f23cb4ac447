"""Beam search: the beams of one request, from its prompt to its answer.

A beam is a `Sequence` with a slot and a row like any other. The request starts with one beam, which computes the
prompt. After each step the group decides which beams continue, which new ones branch off, and which are dropped.

Guarantees:
* A beam that continues keeps its slot, its row and the state of its processors. Only a branch gets copies.
* The request has `width` slots from its first step to its end, so a branch never waits for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from logitship.sampler.ops.logprobs import RowLogprobs
from logitship.sampler.processors.processor_groups import fork_uses, uses_of
from logitship.server.requests.beam_search import Candidate, Hypotheses, Hypothesis, rank_candidates, select
from logitship.server.requests.messages import (
    ABSENT,
    BeamSearch,
    Continuation,
    FinishReason,
    GenerationChunk,
    TokenLogprobs,
)
from logitship.server.requests.sequence import Sequence, Sink


class Beam(Sequence):
    """One running output of a beam search.

    It takes over the state of `source`: its tokens so far, but no slot, no row and no processors of its own.

    Attributes:
        group: the search that it belongs to.
        output: its chunks so far, joined.
        cumulative_logprob: sum of the log-probabilities of its tokens.
    """

    def __init__(
        self, group: BeamGroup, source: Sequence, output: Continuation, cumulative_logprob: float = 0.0
    ) -> None:
        vars(self).update(vars(source.fork(output.add)))
        self.group = group
        self.output = output
        self.cumulative_logprob = cumulative_logprob

    @property
    def num_slots(self) -> int:
        """Slots of the whole search: it starts with all of them, or waits."""
        return self.group.width

    @property
    def lead(self) -> Sequence:
        """The first beam of the search, which stands for its request."""
        return self.group.lead

    def branch(self) -> Beam:
        """Return another beam with the same output so far."""
        return Beam(self.group, self, self.output.copy(), self.cumulative_logprob)

    def extend(self, candidate: Candidate, record: TokenLogprobs) -> None:
        """Append a candidate's token."""
        self.append(candidate.token_id, record)
        self.emit()
        self.cumulative_logprob = candidate.cumulative_logprob


@dataclass(frozen=True)
class BeamStep:
    """Changes to the sequences of a group after a step.

    Attributes:
        dropped: beams without a continuation among the best.
        branched: (source, new beam). The new beam needs a slot with the source's keys and values.
    """

    dropped: list[Beam]
    branched: list[tuple[Beam, Beam]]


class BeamGroup:
    """The beams of one request. See the module docstring.

    Args:
        search: the search's parameters.
        sequence: the request's sequence, not started.
        n: number of outputs in the answer.
        vocab_size: the model's vocabulary size.
        shown_logprobs: number of most likely tokens in the answer at each position; None: no log-probabilities.
        sink: takes the answer.

    Attributes:
        width: number of beams.
        lead: the first beam. It is queued, and identifies the request even after it was dropped.
        spare_slots: slots of the request that no beam has, as a heap.
        is_answered: True once the answer was given.
    """

    def __init__(
        self,
        search: BeamSearch,
        sequence: Sequence,
        n: int,
        vocab_size: int,
        *,
        shown_logprobs: int | None,
        sink: Sink,
    ) -> None:
        self.width = search.width
        self.spare_slots: list[int] = []
        self.is_answered = False
        self._hypotheses: Hypotheses[Continuation] = Hypotheses(search)
        self._num_candidates = min(
            search.num_candidates(len(sequence.sampling_params.end_token_ids)), search.width * vocab_size
        )
        self._n = n
        self._shown_logprobs = shown_logprobs
        self._sink = sink
        self.lead = Beam(self, sequence, Continuation(0, 0))
        self.lead.sampling_params = self.lead.sampling_params.with_checked(
            logprobs=min(max(self._num_candidates, shown_logprobs or 0), vocab_size),
            logprobs_mode="processed_logprobs",
        )
        self._beams = [self.lead]

    @property
    def is_final(self) -> bool:
        """True if no further step can improve the answer."""
        if not self._beams:
            return True
        first = self._beams[0]
        length = len(first.output_token_ids)
        running = [beam.cumulative_logprob for beam in self._beams]
        return self._hypotheses.is_final(running, length, length + first.num_missing)

    @property
    def has_answer(self) -> bool:
        """True if an output has finished."""
        return bool(self._hypotheses.best)

    def advance(self, sampled: Mapping[Sequence, RowLogprobs]) -> BeamStep:
        """Choose the next beams among the candidates of a step.

        Args:
            sampled: the most likely tokens of each beam. A beam that is not in it is dropped.

        Raises:
            ProcessorFault: the state of a beam's processor cannot be copied. The caller ends the search.
        """
        beams = [beam for beam in self._beams if beam in sampled]
        records = [sampled[beam] for beam in beams]
        candidates = rank_candidates(
            [beam.cumulative_logprob for beam in beams], [record.top for record in records], self._num_candidates
        )
        selection = select(
            candidates, self.width, lambda candidate: beams[candidate.beam].would_end(candidate.token_id)
        )
        for candidate in selection.finished:
            beam, record = beams[candidate.beam].branch(), records[candidate.beam]
            beam.extend(candidate, _token_logprobs(record, candidate, self._shown_logprobs))
            self._hypotheses.add(beam.cumulative_logprob, len(beam.output_token_ids), beam.output)
        return self._continue(beams, records, selection.running)

    def _continue(self, beams: list[Beam], records: list[RowLogprobs], running: list[Candidate]) -> BeamStep:
        """Give each candidate a beam: a beam's best candidate keeps it, the others get branches."""
        following: list[Beam] = []
        branched: list[tuple[Beam, Beam]] = []
        kept: set[Beam] = set()
        for candidate in running:
            beam = beams[candidate.beam]
            if beam in kept:
                source, beam = beam, beam.branch()
                branched.append((source, beam))
            kept.add(beam)
            following.append(beam)
        _fork_processors(branched)
        dropped = [beam for beam in self._beams if beam not in kept]
        self._beams = following
        # After all branches were made: a branch starts with the history of its source before this step.
        for beam, candidate in zip(following, running, strict=True):
            beam.extend(candidate, _token_logprobs(records[candidate.beam], candidate, self._shown_logprobs))
        return BeamStep(dropped, branched)

    def finish(self, reason: FinishReason | None = None) -> None:
        """Emit the answer.

        Args:
            reason: why there is none; None: the best hypotheses are the answer. If processors allowed fewer than `n`,
                the rest is `ABSENT`.
        """
        self.is_answered = True
        answered = [] if reason is not None else self._hypotheses.best[: self._n]
        for index, hypothesis in enumerate(answered):
            self._sink(self._chunk(index, hypothesis))
        for index in range(len(answered), self._n):
            self._sink(
                GenerationChunk(
                    index=index,
                    text="",
                    token_ids=[],
                    finish_reason=reason or ABSENT,
                    prompt_tokens=self.lead.num_prompt,
                    completion_tokens=0,
                )
            )

    def _chunk(self, index: int, hypothesis: Hypothesis[Continuation]) -> GenerationChunk:
        output = hypothesis.output
        return GenerationChunk(
            index=index,
            text=output.text,
            token_ids=output.token_ids,
            logprobs=[] if self._shown_logprobs is None else output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=output.finish_reason,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            completion_tokens=output.completion_tokens,
            receipts=output.receipts,
            cumulative_logprob=hypothesis.cumulative_logprob,
            beam_score=hypothesis.score,
        )


def _fork_processors(branched: list[tuple[Beam, Beam]]) -> None:
    """Give each new beam its own copies of its source's processor state.

    Raises:
        ProcessorFault: a state cannot be copied. The copies made so far are closed.
    """
    with contextlib.ExitStack() as on_failure:
        for source, beam in branched:
            uses = fork_uses(uses_of(source.sampling_params), beam.output_token_ids)
            for use in uses:
                on_failure.callback(use.drop_fork)
            beam.sampling_params = source.sampling_params.with_checked(processors=uses)
        on_failure.pop_all()


def _token_logprobs(record: RowLogprobs, candidate: Candidate, top: int | None) -> TokenLogprobs:
    """Return the log-probabilities of a candidate's token, as the answer shows them.

    Args:
        record: the step's log-probabilities of its beam.
        candidate: the candidate.
        top: number of most likely tokens to show.
    """
    _, logprob = record.top[candidate.position]
    more_likely = sum(other > logprob for _, other in record.top[: candidate.position])
    return TokenLogprobs(candidate.token_id, logprob, 1 + more_likely, record.top[: top or 0], record.requested)
