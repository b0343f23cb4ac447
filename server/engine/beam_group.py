"""The beams of one request, from its prompt to its answer.

A beam is a `Sequence` with a slot and a row like any other. The request begins with one of them, which computes the
prompt. After each step the group says which beams go on, which branch off from them, and which are given up.

Guarantees:
* A beam that goes on keeps its slot, its row and what processors keep of it. Only one that branches off gets copies.
* The request has `width` slots from its first step to its end, so that a branch never has to wait for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from logitship.client.errors import ProcessorFault
from logitship.sampler.ops.logprobs import RowLogprobs
from logitship.sampler.processors.processor_use import ProcessorUse, uses_of
from logitship.server.requests.beam_search import BeamSearch, Candidate, Hypotheses, Hypothesis, candidates_of, select
from logitship.server.requests.continuation import Continuation
from logitship.server.requests.messages import ABSENT, FinishReason, GenerationChunk, TokenLogprobs
from logitship.server.requests.sequence import Sequence as EngineSequence
from logitship.server.requests.sequence import Sink


@dataclass(eq=False)
class Beam:
    """A sequence of a search.

    Attributes:
        output: what the sequence has given so far.
        cumulative_logprob: sum of the log-probabilities of its tokens.
    """

    sequence: EngineSequence
    output: Continuation
    cumulative_logprob: float = 0.0

    def branch(self) -> Beam:
        """The same output, for another continuation. It has no slot, no row and no processors of its own."""
        output = self.output.copy()
        return Beam(self.sequence.fork(output.add), output, self.cumulative_logprob)

    def append(self, candidate: Candidate, record: TokenLogprobs) -> None:
        """Go on with a candidate."""
        self.sequence.append(candidate.token_id, record)
        self.cumulative_logprob = candidate.cumulative_logprob


@dataclass(frozen=True)
class BeamStep:
    """What a step does to the sequences of a group.

    Attributes:
        given_up: have no continuation among the best.
        branched: (source, new sequence). The new one needs a slot with the source's keys and values.
    """

    given_up: list[EngineSequence]
    branched: list[tuple[EngineSequence, EngineSequence]]


class BeamGroup:
    """See the module's text.

    Args:
        sequence: of the request, not begun.
        n: number of sequences in the answer.
        vocab_size: the model's.
        shown_logprobs: how many of the most likely tokens the answer shows at each position; None: it shows no
            log-probabilities.
        sink: takes the answer.

    Attributes:
        lead: the first beam, which is to be queued. It stays the one by which others know the request.
        spare_slots: slots of the request that no beam has; a heap.
        is_over: the answer was given.
    """

    def __init__(
        self,
        search: BeamSearch,
        sequence: EngineSequence,
        n: int,
        vocab_size: int,
        *,
        shown_logprobs: int | None,
        sink: Sink,
    ) -> None:
        self.width = search.width
        self.spare_slots: list[int] = []
        self.is_over = False
        self._hypotheses: Hypotheses[Continuation] = Hypotheses(search)
        self._num_candidates = min(
            search.num_candidates(len(sequence.sampling_params.end_token_ids)), search.width * vocab_size
        )
        self._n = n
        self._shown_logprobs = shown_logprobs
        self._sink = sink
        first = Beam(sequence, Continuation(0, 0)).branch()
        self.lead = first.sequence
        self.lead.beams = self
        self.lead.sampling_params = dataclasses.replace(
            self.lead.sampling_params,
            logprobs=min(max(self._num_candidates, shown_logprobs or 0), vocab_size),
            logprobs_mode="processed_logprobs",
        )
        self._beams = [first]

    @property
    def is_final(self) -> bool:
        """True if the search is over."""
        if not self._beams:
            return True
        first = self._beams[0].sequence
        length = len(first.output_token_ids)
        running = [beam.cumulative_logprob for beam in self._beams]
        return self._hypotheses.is_final(running, length, length + first.num_missing)

    @property
    def has_answer(self) -> bool:
        """True if a sequence has finished."""
        return bool(self._hypotheses.best)

    def advance(self, drawn: Mapping[EngineSequence, RowLogprobs]) -> BeamStep:
        """Choose among the continuations of a step.

        Args:
            drawn: the most likely tokens of each beam; a beam that is left out has no continuation.

        Raises:
            ProcessorFault: what a processor keeps of a beam cannot be copied. The group is to be ended.
        """
        beams = [beam for beam in self._beams if beam.sequence in drawn]
        records = [drawn[beam.sequence] for beam in beams]
        candidates = candidates_of(
            [beam.cumulative_logprob for beam in beams], [record.top for record in records], self._num_candidates
        )
        selection = select(
            candidates, self.width, lambda candidate: beams[candidate.beam].sequence.would_end(candidate.token_id)
        )
        for candidate in selection.finished:
            beam, record = beams[candidate.beam].branch(), records[candidate.beam]
            beam.append(candidate, _token_logprobs(record, candidate, self._shown_logprobs))
            self._hypotheses.add(beam.cumulative_logprob, len(beam.sequence.output_token_ids), beam.output)
        return self._go_on(beams, records, selection.running)

    def _go_on(self, beams: Sequence[Beam], records: Sequence[RowLogprobs], running: Sequence[Candidate]) -> BeamStep:
        """Give each candidate a beam: its own to the best one of a beam, branches to the others."""
        following: list[Beam] = []
        branched: list[tuple[EngineSequence, EngineSequence]] = []
        kept: set[EngineSequence] = set()
        for candidate in running:
            beam = beams[candidate.beam]
            if beam.sequence in kept:
                source, beam = beam.sequence, beam.branch()
                branched.append((source, beam.sequence))
            kept.add(beam.sequence)
            following.append(beam)
        _fork_processors(branched)
        given_up = [beam.sequence for beam in self._beams if beam.sequence not in kept]
        self._beams = following
        # Only now: a branch begins with what its source was before.
        for beam, candidate in zip(following, running, strict=True):
            beam.append(candidate, _token_logprobs(records[candidate.beam], candidate, self._shown_logprobs))
        return BeamStep(given_up, branched)

    def finish(self, reason: FinishReason | None = None) -> None:
        """Give the answer.

        Args:
            reason: why there is none; None: the hypotheses are the answer. Where there are fewer than were asked for,
                because processors allow no more, the rest is `ABSENT`.
        """
        self.is_over = True
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
        output = hypothesis.sequence
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


def _fork_processors(branched: Sequence[tuple[EngineSequence, EngineSequence]]) -> None:
    """Give new sequences their own copies of what processors keep of their sources.

    Raises:
        ProcessorFault: something cannot be copied. Nothing is left of the other copies.
    """
    forked: list[ProcessorUse] = []
    try:
        for source, sequence in branched:
            uses = []
            for use in uses_of(source.sampling_params):
                uses.append(use.fork(sequence.output_token_ids))
                forked.append(uses[-1])
            sequence.sampling_params = dataclasses.replace(source.sampling_params, processors=tuple(uses))
    except ProcessorFault:
        for use in forked:
            use.drop_fork()
        raise


def _token_logprobs(record: RowLogprobs, candidate: Candidate, top: int | None) -> TokenLogprobs:
    """What the answer shows of a candidate's token.

    Args:
        record: of its beam's step.
        top: how many of the most likely tokens it shows.
    """
    _, logprob = record.top[candidate.place]
    more_likely = sum(other > logprob for _, other in record.top[: candidate.place])
    return TokenLogprobs(candidate.token_id, logprob, 1 + more_likely, record.top[: top or 0])
