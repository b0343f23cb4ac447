"""Measurements of the server during the soak test, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soak_server import ServerResources

MEMORY = ("server_pss", "tree_pss")
_MUST_NOT_GROW = ("descriptors", "threads", "processes", "zombies", "files")
_WINDOW = 5
"""Idle samples per median: the memory that the allocator retains varies by some megabytes."""


@dataclass(frozen=True)
class Sample:
    """The server at one moment.

    Attributes:
        requests: number of finished requests.
        seconds: time since the first request.
        quiet: True if no request was running and all sandboxes were alive.
        resources: resources of the server and its processes.
        engine: the engine's state, as `/server_info` reports it.
    """

    requests: int
    seconds: float
    quiet: bool
    resources: ServerResources
    engine: dict[str, Any]

    def __str__(self) -> str:
        resources, engine = self.resources, self.engine
        return (
            f"{self.requests:6} requests {self.seconds:7.0f} s {'quiet' if self.quiet else '     '}"
            f"  server {resources.server_pss / 2**20:7.1f} MiB, all {resources.tree_pss / 2**20:7.1f} MiB"
            f"  {resources.descriptors} descriptors, {resources.threads} threads, {resources.processes} processes"
            f"  {engine['sandboxes']} sandboxes, {engine['sandboxes_started']} started"
            f"  {engine['running']} running, {engine['waiting']} waiting"
        )


def summary(kind: str, failures: Sequence[str]) -> list[str]:
    """Return a line with the number of failures and the first one in full; no line if there are none."""
    return [f"{len(failures)} {kind}, such as: {failures[0]}"] if failures else []


def grown(quiet: Sequence[Sample], max_drift: float) -> Iterator[str]:
    """Describe the resources that grew between the first and the last idle point."""
    first, last = quiet[0], quiet[-1]
    for name in _MUST_NOT_GROW:
        before, after = getattr(first.resources, name), getattr(last.resources, name)
        if after > before:
            yield f"{name}: {before} after {first.requests} requests, {after} after {last.requests}"
    for name in MEMORY:
        if (drift := memory_drift(quiet, name)) >= max_drift:
            yield f"{name} grew by {drift:.2%}"


def memory_drift(quiet: Sequence[Sample], name: str) -> float:
    """Return the relative growth of memory between the medians of the first and of the last idle points."""
    sizes = [getattr(sample.resources, name) for sample in quiet]
    count = min(_WINDOW, len(sizes) // 2)
    return float(statistics.median(sizes[-count:]) / statistics.median(sizes[:count]) - 1)
