"""Plays recorded sequences once more, in another company or another order, and looks for a row that differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from logitship.client.errors import ProcessorFault

from .bench import Called, Player, Stage
from .recording import Recording

_RELATIVE, _ABSOLUTE = 1e-5, 1e-4
"""Tolerances. A sum over a batch may round another way than a sum over a row; a bug is larger."""

Call: TypeAlias = list[tuple[int, int]]
"""The rows of a call: which recording, and which step of it."""


@dataclass(frozen=True, eq=False)
class Mismatch:
    """A row that is not as it was recorded.

    Attributes:
        call: the rows of the call.
        place: of the row among them.
        fault: what happened instead of an answer, or None.
        row_by_row: the call failed for its rows together; there is an answer all the same.
        token: whose logit differs most.
        expected: its logit when the sequence was alone.
        got: its logit here.
        count: how many logits differ.
    """

    call: Call
    place: int
    fault: ProcessorFault | None = None
    row_by_row: bool = False
    token: int = 0
    expected: float = 0.0
    got: float = 0.0
    count: int = 0

    @property
    def recording(self) -> int:
        """Which recording it belongs to."""
        return self.call[self.place][0]

    @property
    def step(self) -> int:
        """Which step of it, from 0."""
        return self.call[self.place][1]


def alone(recordings: Sequence[Recording], numbers: Iterable[int]) -> Iterator[Call]:
    """One sequence after the other."""
    for number in numbers:
        for step in range(recordings[number].steps):
            yield [(number, step)]


def interleaved(recordings: Sequence[Recording], numbers: Sequence[int]) -> Iterator[Call]:
    """All sequences in turns, a call for each."""
    for step in range(max((recordings[number].steps for number in numbers), default=0)):
        for number in numbers:
            if step < recordings[number].steps:
                yield [(number, step)]


def together(recordings: Sequence[Recording], numbers: Sequence[int]) -> Iterator[Call]:
    """All sequences as a batch, in this order. They join one after the other, and leave as they end."""
    first_step = {number: place for place, number in enumerate(sorted(numbers))}
    last = max((first_step[number] + recordings[number].steps for number in numbers), default=0)
    for time in range(last):
        call = [(number, time - first_step[number]) for number in numbers]
        if rows := [(number, step) for number, step in call if 0 <= step < recordings[number].steps]:
            yield rows


def replay(stage: Stage, recordings: Sequence[Recording], calls: Iterable[Call]) -> Mismatch | None:
    """Make the calls, and stop at the first row that differs.

    Each sequence has the logits and takes the tokens that were recorded.
    """
    players: dict[int, Player] = {}
    for call in calls:
        for number, _ in call:
            if number not in players:
                trial = recordings[number].trial
                players[number] = stage.enter(trial.rid, trial.params, trial.prompt_token_ids)
        found = play_call(stage, recordings, call, [players[number] for number, _ in call])
        if found is not None:
            return found
        for number, step in call:
            if step == recordings[number].steps - 1:
                players.pop(number).row.close()
    return None


def play_call(stage: Stage, recordings: Sequence[Recording], call: Call, players: Sequence[Player]) -> Mismatch | None:
    """Make a call, let its sequences take their tokens, and say which row differs, if one does."""
    logits = torch.stack([recordings[number].inputs[step] for number, step in call])
    found = _first_mismatch(recordings, call, stage.call(players, logits))
    for (number, step), player in zip(call, players, strict=True):
        player.tokens.append(recordings[number].tokens[step])
    return found


def _first_mismatch(recordings: Sequence[Recording], call: Call, called: Called) -> Mismatch | None:
    for place, (number, step) in enumerate(call):
        if place in called.faults:
            return Mismatch(call, place, fault=called.faults[place])
        expected, got = recordings[number].outputs[step], called.logits[place]
        # torch.isclose takes equal infinities for close, and NaN for close to nothing.
        if differs := int((~torch.isclose(got, expected, rtol=_RELATIVE, atol=_ABSOLUTE)).sum()):
            token = _worst(expected, got)
            return Mismatch(
                call, place, token=token, expected=float(expected[token]), got=float(got[token]), count=differs
            )
    return Mismatch(call, 0, row_by_row=True) if called.row_by_row else None


def _worst(expected: torch.Tensor, got: torch.Tensor) -> int:
    """The token whose logit differs most."""
    # Of two infinities of one sign, the difference is NaN; so is that of a NaN and anything, which is the worst.
    distance = torch.where(expected == got, 0.0, (got - expected).abs()).nan_to_num(nan=torch.inf)
    return int(distance.argmax())
