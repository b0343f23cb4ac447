"""Record test cases one by one, and replay them in other batches.

A recording is the reference: its sequence had a fresh processor to itself. A replay makes the same calls in another
order or another batch composition, and looks for a row that differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import non_finite_fault

from .cases import CheckCase
from .environment import CallResult, CheckSequence, FreshProcessor

_RELATIVE, _ABSOLUTE = 1e-5, 1e-4
"""Tolerances. A reduction over a batch may round differently from one over a single row; a bug differs by more."""

Call: TypeAlias = list[tuple[int, int]]
"""The rows of a call: the index of a recording, and the step of it."""


@dataclass(eq=False)
class Recording:
    """A sequence that had its processor to itself.

    Attributes:
        inputs: the logits of each step, float32 [vocab]. One more than `outputs` if the last step failed.
        outputs: the processed logits of each step, float32 [vocab].
        tokens: the token chosen after each step: the most likely one.
        fault: why the sequence ended early, or None.
        printed: what the processor printed in these steps. A fault has what was printed before it.
    """

    case: CheckCase
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    fault: ProcessorFault | None = None
    printed: str = ""

    @property
    def steps(self) -> int:
        """Number of steps that succeeded."""
        return len(self.outputs)


def record(processor: FreshProcessor, case: CheckCase, max_tokens: int, eos_token_ids: Collection[int]) -> Recording:
    """Run a test case until its sequence ends, fails, or reaches `max_tokens`."""
    recording = Recording(case)
    sequence, next_logits = processor.start_sequence(case.rid, case.params, case.prompt_token_ids), case.source()
    while recording.steps < max_tokens and not set(recording.tokens[-1:]) & set(eos_token_ids):
        logits = next_logits(sequence.tokens)
        recording.inputs.append(logits)
        called = processor.call([sequence], logits[None])
        output = called.logits[0]
        recording.fault = called.faults.get(0)
        if recording.fault is None and not bool(torch.isfinite(output.amax())):
            recording.fault = non_finite_fault(output, name="")
        if recording.fault is not None:
            break
        recording.outputs.append(output)
        recording.printed += called.printed
        recording.tokens.append(int(output.argmax()))
        sequence.tokens.append(recording.tokens[-1])
    sequence.row.close()
    return recording


@dataclass(frozen=True, eq=False)
class Mismatch:
    """A row that differs from its recording.

    Attributes:
        call: the rows of the call.
        row: index of the row in the call.
        fault: the fault that the row ended with, or None.
        row_by_row: the call failed for its rows together, and succeeded for each row alone.
        token: the token whose logit differs most.
        expected: its recorded logit.
        got: its logit in the replay.
        count: number of logits that differ.
    """

    call: Call
    row: int
    fault: ProcessorFault | None = None
    row_by_row: bool = False
    token: int = 0
    expected: float = 0.0
    got: float = 0.0
    count: int = 0

    @property
    def recording(self) -> int:
        """Index of the row's recording."""
        return self.call[self.row][0]

    @property
    def step(self) -> int:
        """Step of the recording, from 0."""
        return self.call[self.row][1]


def one_by_one(recordings: Sequence[Recording], numbers: Iterable[int]) -> Iterator[Call]:
    """Schedule the sequences one after the other."""
    for number in numbers:
        for step in range(recordings[number].steps):
            yield [(number, step)]


def interleaved(recordings: Sequence[Recording], numbers: Sequence[int]) -> Iterator[Call]:
    """Schedule the sequences in turns, with a call for each."""
    for step in range(max((recordings[number].steps for number in numbers), default=0)):
        for number in numbers:
            if step < recordings[number].steps:
                yield [(number, step)]


def batched(recordings: Sequence[Recording], numbers: Sequence[int], *, at_once: bool = False) -> Iterator[Call]:
    """Schedule the sequences as a batch. Each is removed when it ends.

    Args:
        recordings: all recordings.
        numbers: indices of the sequences, in the order of their rows.
        at_once: begin all sequences in the first step, instead of one in each step. Of sequences that are shorter than
            their number, only then all are in one batch.
    """
    first_step = {number: 0 if at_once else position for position, number in enumerate(sorted(numbers))}
    last = max((first_step[number] + recordings[number].steps for number in numbers), default=0)
    for time in range(last):
        call = [(number, time - first_step[number]) for number in numbers]
        if rows := [(number, step) for number, step in call if 0 <= step < recordings[number].steps]:
            yield rows


def replay(processor: FreshProcessor, recordings: Sequence[Recording], calls: Iterable[Call]) -> Mismatch | None:
    """Make the calls with the recorded logits and tokens, and return the first row that differs."""
    sequences: dict[int, CheckSequence] = {}
    for call in calls:
        for number, _ in call:
            if number not in sequences:
                case = recordings[number].case
                sequences[number] = processor.start_sequence(case.rid, case.params, case.prompt_token_ids)
        mismatch = replay_call(processor, recordings, call, [sequences[number] for number, _ in call])
        if mismatch is not None:
            return mismatch
        for number, step in call:
            if step == recordings[number].steps - 1:
                sequences.pop(number).row.close()
    return None


def replay_call(
    processor: FreshProcessor, recordings: Sequence[Recording], call: Call, sequences: Sequence[CheckSequence]
) -> Mismatch | None:
    """Make one call, append the recorded tokens, and return the first row that differs."""
    logits = torch.stack([recordings[number].inputs[step] for number, step in call])
    mismatch = _first_mismatch(recordings, call, processor.call(sequences, logits))
    for (number, step), sequence in zip(call, sequences, strict=True):
        sequence.tokens.append(recordings[number].tokens[step])
    return mismatch


def _first_mismatch(recordings: Sequence[Recording], call: Call, called: CallResult) -> Mismatch | None:
    for row, (number, step) in enumerate(call):
        if row in called.faults:
            return Mismatch(call, row, fault=called.faults[row])
        expected, got = recordings[number].outputs[step], called.logits[row]
        # torch.isclose treats equal infinities as close, and NaN as close to nothing.
        if differs := int((~torch.isclose(got, expected, rtol=_RELATIVE, atol=_ABSOLUTE)).sum()):
            token = _largest_difference(expected, got)
            return Mismatch(
                call, row, token=token, expected=float(expected[token]), got=float(got[token]), count=differs
            )
    return Mismatch(call, 0, row_by_row=True) if called.row_by_row else None


def _largest_difference(expected: torch.Tensor, got: torch.Tensor) -> int:
    """Return the token whose logit differs most."""
    # The difference of two infinities of the same sign is NaN, as is that of NaN and anything, which ranks first.
    distance = torch.where(expected == got, 0.0, (got - expected).abs()).nan_to_num(nan=torch.inf)
    return int(distance.argmax())
