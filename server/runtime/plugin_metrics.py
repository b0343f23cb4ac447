"""Metrics of the processors in the processes of another engine, which its front end adds to its own `/metrics`.

Each process writes its metrics to a file, once a second in a thread, and the front end adds up the files at each
scrape: a step only adds to counters. None of them is a metric object of `prometheus_client`, which would export itself
a second time in its multiprocess mode, which engines use. For the same reason the module is imported late: engines set
`PROMETHEUS_MULTIPROC_DIR` before they import `prometheus_client`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ObserveCall
from logitship.server.metrics.engine_stats import ProcessorStats
from logitship.server.metrics.observed_metrics import (
    LOAD_BUCKETS,
    PHASE_BUCKETS,
    CallStatistics,
    ProcessorCalls,
    ProcessorFaults,
    ProcessorLabels,
)
from logitship.server.metrics.state_collector import processor_state

INTERVAL = 1.0
"""Seconds between two snapshots."""
_PREFIX = "logitship-"
_numbers = itertools.count()


class PluginMetrics(Collector):
    """The metrics of the processors in this process.

    Args:
        installed: digest → name of the installed processors.
        most_names: how many names of shipped processors get a label of their own.
        read: returns the current stats, on any thread.
    """

    def __init__(self, installed: Mapping[str, str], most_names: int, read: Callable[[], ProcessorStats]) -> None:
        self._labels = ProcessorLabels(installed, most_names)
        self._calls = ProcessorCalls(PHASE_BUCKETS)
        self._faults = ProcessorFaults(self._labels)
        self._loads = CallStatistics(LOAD_BUCKETS)
        self._read = read

    def call_observer(self, processor: LoadedProcessor) -> ObserveCall:
        """Return the function that takes each call of a processor. Engine thread only."""
        return self._calls.statistics(self._labels.label(processor.digest, processor.name)).observe

    def failed(self, fault: ProcessorFault) -> None:
        """Count a request that was ended by a fault of a processor. Engine thread only."""
        self._faults.add(fault.digest, fault.name, fault.kind)

    def loaded(self, seconds: float) -> None:
        """Observe the load of a processor at the admission of a request. One thread only."""
        self._loads.observe(1, seconds)

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. Any thread."""
        yield from self._calls.collect()
        yield from self._faults.collect()
        yield HistogramMetricFamily(
            "logitship_processor_load_duration_seconds",
            "Time to load the processors of a request, at its admission.",
            self._loads.buckets(),
            self._loads.seconds,
        )
        yield from processor_state(self._read())


class MetricsFile:
    """The metrics of this process, in a file.

    Args:
        directory: the folder that all processes of the engine share.
        metrics: the metrics.
        logger: the engine's logger of logitship.
    """

    def __init__(self, directory: str, metrics: Collector, logger: logging.Logger) -> None:
        self._path = Path(directory, f"{_PREFIX}{os.getpid()}-{next(_numbers)}.json")
        self._metrics = metrics
        self._logger = logger
        self._written = b""

    def start(self) -> None:
        """Write it from now on, in a thread."""
        try:
            threading.Thread(target=self._run, name="logitship-metrics", daemon=True).start()
        except RuntimeError as error:
            self._logger.warning("the metrics of processors in this process are missing: %s", error)

    def write(self) -> None:
        """Write it if something has changed."""
        families = [
            (
                each.name,
                each.documentation,
                each.type,
                [(name, labels, value) for name, labels, value, *_ in each.samples],
            )
            for each in self._metrics.collect()
        ]
        content = orjson.dumps(families)
        if content != self._written:
            new = self._path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(self._path)
            self._written = content

    def _run(self) -> None:
        has_failed = False
        while True:
            try:
                self.write()
                has_failed = False
            except FileNotFoundError:
                return  # the front end has ended, or is on another machine
            except Exception:  # boundary: other engine
                if not has_failed:
                    self._logger.exception("the metrics of processors in this process cannot be written")
                has_failed = True
            time.sleep(INTERVAL)


class SummedMetrics(Collector):
    """The metrics of all processes of an engine: sums over the processes, without the gauges of those that have ended.

    Args:
        directory: the folder with their files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def describe(self) -> Iterable[Metric]:
        """Return a metric by which a registry recognizes another `SummedMetrics`."""
        return [Metric("logitship_sandboxes", "", "gauge")]

    def collect(self) -> Iterable[Metric]:
        """Return the sums."""
        families: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for path in sorted(self._directory.glob(f"{_PREFIX}*.json")):
            try:
                content = orjson.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            has_ended = not Path("/proc", path.name.removeprefix(_PREFIX).partition("-")[0]).exists()
            for name, documentation, kind, samples in content:
                sums = families.setdefault(name, (documentation, kind, {}))[2]
                for sample, labels, value in [] if has_ended and kind == "gauge" else samples:
                    key = (sample, tuple(labels.items()))
                    sums[key] = sums.get(key, 0.0) + value
        for name, (documentation, kind, sums) in families.items():
            metric = Metric(name, documentation, kind)
            for (sample, labels), value in sums.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


def register(registry: CollectorRegistry, directory: str) -> None:
    """Let a registry return the metrics of all processes, too."""
    with contextlib.suppress(ValueError):  # it does already
        registry.register(SummedMetrics(directory))
