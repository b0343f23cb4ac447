from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from logitship.server.metrics import observed_metrics, step_clock

Read = Callable[..., float | None]
"""Returns a sample of a registry by name and labels, or None."""


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def read(registry: CollectorRegistry) -> Read:
    return lambda name, **labels: registry.get_sample_value(f"logitship_{name}", labels)


class Time:
    """Replaces the module `time`; the test sets the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    for module in (observed_metrics, step_clock):
        monkeypatch.setattr(module, "time", time)
    return time
