"""Reads the metrics of a server."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

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


def growth(before: Total, url: str, key: str, num_calls: int) -> Total:
    """Wait until so many more calls are counted, and return by how much each metric has grown.

    Args:
        before: what `read_metrics` returned.
        url: base URL of the server.
        key: its API key.
        num_calls: calls of processors. Engines that run the plugin show them after a second.
    """
    while (now := read_metrics(url, key))("processor_calls_total") < before("processor_calls_total") + num_calls or (
        now("processor_faults_total") == before("processor_faults_total")
    ):
        time.sleep(0.1)
    return lambda name, **labels: now(name, **labels) - before(name, **labels)
