"""Time the author's code in this process, without the overhead of the sandbox.

Measured on one thread, like in a sandbox. The sandbox's overhead is larger than the run time of most processors: as
the difference of two sandbox calls, the code's own time would be lost in noise.
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
from .replay import Recording

SECONDS = 0.5
"""Duration of a measurement."""
MIN_CALLS, MAX_CALLS = 7, 100
WARM_UP = 2
"""Calls that are not counted: the first calls fill caches and tables."""


def median_seconds(
    dry_run: DryRun, recordings: Sequence[Recording], logits: torch.Tensor, num_tokens: int = 0
) -> float | None:
    """Return the median time of a call. After each call, each sequence appends its most likely token.

    Args:
        dry_run: the processor in this process.
        recordings: give the sequences their parameters, prompts and tokens.
        logits: float32 [rows, vocab].
        num_tokens: output tokens of each sequence before the first call: the recorded ones, repeated.

    Returns:
        Seconds, or None if a call fails.
    """
    rows = [recordings[row % len(recordings)] for row in range(len(logits))]
    members = dry_run.members(rows)
    for member, recording in zip(members, rows, strict=True):
        member.extend(list(itertools.islice(itertools.cycle(recording.tokens), num_tokens)))
    seconds: list[float] = []
    started = time.perf_counter()
    with one_thread():
        while len(seconds) < MIN_CALLS or (time.perf_counter() - started < SECONDS and len(seconds) < MAX_CALLS):
            given = logits.clone()
            call_started = time.perf_counter()
            try:
                output = dry_run.call(members, given)
                seconds.append(time.perf_counter() - call_started)
                append_tokens(members, output)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001  # boundary: author code
                return None
    return statistics.median(seconds[WARM_UP:])


def append_tokens(members: Sequence[SequenceState], output: Any) -> None:
    """Append its most likely token to each sequence.

    Args:
        members: one per row.
        output: what the processor returned, [rows, vocab].
    """
    for member, token in zip(members, output.argmax(dim=-1).tolist(), strict=True):
        member.extend([token])


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in a sandbox."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
