from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram

from logitship.server.metrics.processor_calls import ProcessorCalls
from logitship.server.metrics.processor_labels import ProcessorLabel

BOUNDS = (0.001, 0.01, 0.1)
NAME = "logitship_processor_call_duration_seconds"


@pytest.mark.parametrize("seconds", [[], [0.0], [0.001], [0.0010001], [0.05, 0.1, 5.0], [0.02] * 3])
def test_equal_to_prometheus_histogram(seconds: list[float]) -> None:
    our_registry, reference_registry = CollectorRegistry(), CollectorRegistry()
    calls = ProcessorCalls(BOUNDS)
    our_registry.register(calls)
    histogram = Histogram(NAME, "Time.", ["processor", "origin"], buckets=BOUNDS, registry=reference_registry)
    counted, child = calls.statistics(ProcessorLabel("P", "shipped")), histogram.labels("P", "shipped")
    for each in seconds:
        counted.observe(2, each)
        child.observe(each)
    labels = {"processor": "P", "origin": "shipped"}
    for suffix, more in [
        ("_sum", {}),
        ("_count", {}),
        *(("_bucket", {"le": le}) for le in ("0.001", "0.01", "0.1", "+Inf")),
    ]:
        sample = NAME + suffix, labels | more
        assert our_registry.get_sample_value(*sample) == reference_registry.get_sample_value(*sample) is not None
    assert our_registry.get_sample_value("logitship_processor_rows_total", labels) == 2 * len(seconds)


def test_statistics_by_label() -> None:
    calls = ProcessorCalls(BOUNDS)
    one = calls.statistics(ProcessorLabel("P", "shipped"))
    assert calls.statistics(ProcessorLabel("P", "shipped")) is one
    assert calls.statistics(ProcessorLabel("P", "installed")) is not one
