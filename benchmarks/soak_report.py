"""Measurements of the server during the soak test, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soak_server import Taken

MEMORY = ("server_pss", "tree_pss")
_MUST_NOT_GROW = ("descriptors", "threads", "processes", "zombies", "files")
_WINDOW = 5
"""Quiet samples that one median is taken of: what the allocator keeps comes and goes by some megabytes."""


@dataclass(frozen=True)
class Sample:
    """The server at one moment.

    Attributes:
        requests: that were done.
        seconds: since the first one.
        quiet: nothing ran, and all sandboxes were there.
        engine: what the engine says of itself.
    """

    requests: int
    seconds: float
    quiet: bool
    taken: Taken
    engine: dict[str, Any]

    def __str__(self) -> str:
        taken, engine = self.taken, self.engine
        return (
            f"{self.requests:6} requests {self.seconds:7.0f} s {'quiet' if self.quiet else '     '}"
            f"  server {taken.server_pss / 2**20:7.1f} MiB, all {taken.tree_pss / 2**20:7.1f} MiB"
            f"  {taken.descriptors} descriptors, {taken.threads} threads, {taken.processes} processes"
            f"  {engine['sandboxes']} sandboxes, {engine['sandboxes_started']} started"
            f"  {engine['running']} running, {engine['waiting']} waiting"
        )


def first_of(what: str, them: Sequence[str]) -> list[str]:
    """Describe things of which there should be none: their number, and the first in full; empty if there are none."""
    return [f"{len(them)} {what}, such as: {them[0]}"] if them else []


def grown(quiet: Sequence[Sample], max_drift: float) -> Iterator[str]:
    """Describe the resources that grew between the first and the last idle point."""
    first, last = quiet[0], quiet[-1]
    for name in _MUST_NOT_GROW:
        before, after = getattr(first.taken, name), getattr(last.taken, name)
        if after > before:
            yield f"{name}: {before} after {first.requests} requests, {after} after {last.requests}"
    for name in MEMORY:
        if (drift := memory_drift(quiet, name)) >= max_drift:
            yield f"{name} grew by {drift:.2%}"


def memory_drift(quiet: Sequence[Sample], name: str) -> float:
    """Return the relative growth of memory between the medians of the first and of the last idle points."""
    sizes = [getattr(sample.taken, name) for sample in quiet]
    count = min(_WINDOW, len(sizes) // 2)
    return float(statistics.median(sizes[-count:]) / statistics.median(sizes[:count]) - 1)
