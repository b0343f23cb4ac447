from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

Read = Callable[..., float | None]
"""Returns a sample of a registry by name and labels, or None."""


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def read(registry: CollectorRegistry) -> Read:
    return lambda name, **labels: registry.get_sample_value(f"logitship_{name}", labels)
