"""Metrics of processor calls. They are counted per group and step, so in as few instructions as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .processor_labels import ProcessorLabel


class CallStatistics:
    """Statistics of the calls with one label. Written by one thread, without a lock.

    Args:
        bounds: upper bounds of the histogram's buckets, in seconds, ascending. A last bucket has no bound.

    Attributes:
        counts: calls in each bucket.
        seconds: total duration.
        rows: total rows.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0
        self.rows = 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count a call."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds
        self.rows += num_rows


class ProcessorCalls(Collector):
    """Collects the call statistics of all labels at each scrape.

    Args:
        bounds: see `CallStatistics`.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._by_label: dict[ProcessorLabel, CallStatistics] = {}

    def statistics(self, label: ProcessorLabel) -> CallStatistics:
        """Return the statistics of a label."""
        return self._by_label.setdefault(label, CallStatistics(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. Any thread."""
        durations = HistogramMetricFamily(
            "logitship_processor_call_duration_seconds",
            "Time of a call of a processor. It is called once a step, for all of its rows.",
            labels=["processor", "origin"],
        )
        rows = CounterMetricFamily(
            "logitship_processor_rows", "Rows that a processor was called with.", labels=["processor", "origin"]
        )
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for label, calls in list(self._by_label.items()):
            labels = [label.name, label.origin]
            durations.add_metric(labels, list(zip(names, accumulate(calls.counts), strict=True)), calls.seconds)
            rows.add_metric(labels, calls.rows)
        yield durations
        yield rows
