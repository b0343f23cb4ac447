"""How long an author's code takes, without the way into the sandbox and back.

Measured in this process on one thread, which is what a sandbox has. The way costs more than most processors: as the
difference of two calls of a sandbox, the code's own time would drown in what else the machine does.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from logitship.sampler.sandbox.worker import SequenceState

from .dry_run import DryRun
from .recording import Recording

SECONDS = 0.5
"""For a measurement."""
FEWEST_CALLS, MOST_CALLS = 7, 100
WARM_UP = 2
"""Calls that are not counted: tables are made in the first."""


def own_seconds(
    rehearsal: DryRun, recordings: Sequence[Recording], logits: torch.Tensor, num_tokens: int = 0
) -> float | None:
    """Median of a call. Each sequence takes the most likely token after each.

    Args:
        logits: float32 [rows, vocab].
        num_tokens: that the sequences have as output before the first call: those that were recorded, over and over.

    Returns:
        None if a call fails.
    """
    played = [recordings[row % len(recordings)] for row in range(len(logits))]
    members = rehearsal.members(played)
    for member, recording in zip(members, played, strict=True):
        member.extend(list(itertools.islice(itertools.cycle(recording.tokens), num_tokens)))
    seconds: list[float] = []
    began = time.perf_counter()
    with one_thread():
        while len(seconds) < FEWEST_CALLS or (time.perf_counter() - began < SECONDS and len(seconds) < MOST_CALLS):
            given = logits.clone()
            called = time.perf_counter()
            try:
                output = rehearsal.call(members, given)
            except BaseException:  # noqa: BLE001  # the author's code may raise anything; the sandbox said what is wrong
                return None
            seconds.append(time.perf_counter() - called)
            take_tokens(members, output)
    return statistics.median(seconds[WARM_UP:])


def take_tokens(members: Sequence[SequenceState], output: Any) -> None:
    """Each sequence takes its most likely token.

    Args:
        output: what the processor returned, [rows, vocab].
    """
    for member, token in zip(members, output.argmax(dim=-1).tolist(), strict=True):
        member.extend([token])


@contextmanager
def one_thread() -> Iterator[None]:
    """While it lasts, torch computes on one thread, as it does in a sandbox."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
