"""Time the author's code in this process, without the overhead of the sandbox.

Measured on one thread, like in a sandbox. The sandbox's overhead is larger than the run time of most processors: as
the difference of two sandbox calls, the code's own time would be lost in noise.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .dry_run import DryRun
from .replayed_calls import Recording

SECONDS = 0.5
"""Duration of a measurement."""
_MIN_CALLS, _MAX_CALLS = 7, 100
_WARM_UP = 2
"""Calls that are not counted: the first calls fill caches and tables."""


def median_of_calls(call: Callable[[int], float]) -> float:
    """Repeat a call for `SECONDS`, and return the median of the seconds that it returns.

    Args:
        call: takes the number of the call, negative for those that are not counted.
    """
    seconds: list[float] = []
    started = time.perf_counter()
    while len(seconds) < _MIN_CALLS or (time.perf_counter() - started < SECONDS and len(seconds) < _MAX_CALLS):
        seconds.append(call(len(seconds) - _WARM_UP))
    return statistics.median(seconds[_WARM_UP:])


def median_seconds(
    dry_run: DryRun,
    recordings: Sequence[Recording],
    logits: torch.Tensor,
    num_tokens: int = 0,
    profiler: AbstractContextManager[object] | None = None,
) -> float | None:
    """Return the median time of a call. After each call, each sequence appends its most likely token.

    Args:
        dry_run: the processor in this process.
        recordings: give the sequences their parameters, prompts and tokens.
        logits: float32 [rows, vocab].
        num_tokens: output tokens of each sequence before the first call: the recorded ones, repeated.
        profiler: active during the calls that are counted.

    Returns:
        Seconds, or None if a call fails.
    """
    rows = [recordings[row % len(recordings)] for row in range(len(logits))]
    members = dry_run.members(rows)
    for member, recording in zip(members, rows, strict=True):
        member.extend(list(itertools.islice(itertools.cycle(recording.tokens), num_tokens)))

    def call(number: int) -> float:
        given = logits.clone()
        with nullcontext() if profiler is None or number < 0 else profiler:
            started = time.perf_counter()
            output = dry_run.call(members, given)
            seconds = time.perf_counter() - started
        for member, token in zip(members, output.argmax(dim=-1).tolist(), strict=True):
            member.extend([token])
        return seconds

    try:
        with _one_thread():
            return median_of_calls(call)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # boundary: author code
        return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in a sandbox."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
