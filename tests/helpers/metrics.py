"""Reads the metrics of a server."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from logitship.server.runtime.plugin_metrics import INTERVAL

_COUNTED = ("processor_calls_total", "processor_faults_total", "processor_load_duration_seconds_count")
Total = Callable[..., float]
"""Returns the sum of the samples with this name after `logitship_`, and with these labels."""


def read_metrics(url: str, key: str = "") -> Total:
    """Read the metrics of a server, each of which must be there once.

    Args:
        url: base URL of the server.
        key: its API key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=60).raise_for_status().text
    families = [*text_string_to_metric_families(text)]
    samples = [sample for family in families for sample in family.samples]
    assert len({(each.name, *sorted(each.labels.items())) for each in samples}) == len(samples)
    assert len({family.name for family in families}) == len(families)

    def total(name: str, **labels: str) -> float:
        found = [each for each in samples if each.name == f"logitship_{name}" and labels.items() <= each.labels.items()]
        return sum(each.value for each in found)

    return total


def settled_metrics(url: str, key: str = "") -> Total:
    """Read the metrics of an engine that runs the plugin, once all earlier requests are in them.

    Each of its processes shows its own once a second.
    """
    read = read_metrics(url, key)
    while True:
        before = [read(name) for name in _COUNTED]
        time.sleep(3 * INTERVAL)
        read = read_metrics(url, key)
        if before == [read(name) for name in _COUNTED]:
            return read


def growth(before: Total, url: str, key: str, num_calls: int) -> Total:
    """Wait until so many more calls and a fault are counted, and return by how much each metric has grown.

    Args:
        before: what `settled_metrics` returned.
        url: base URL of the server.
        key: its API key.
        num_calls: calls of processors.
    """
    while (now := settled_metrics(url, key))("processor_calls_total") < before("processor_calls_total") + num_calls or (
        now("processor_faults_total") == before("processor_faults_total")
    ):
        pass
    return lambda name, **labels: now(name, **labels) - before(name, **labels)
