"""Prometheus metrics that are observed as things happen, in a registry of their own.

Of requests: waiting and running times, token counts, finish reasons. Processor calls are counted per group and step, so
in as few instructions as possible. Labels of processors are bounded in number, however many names clients use.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from logitship.sampler.processors.executor import LoadedProcessor, LogitsUse
from logitship.sampler.processors.processor_groups import ObserveCall
from logitship.server.requests.messages import FinishReason, GenerationChunk

from .engine_stats import OTHER, EngineStats, ModelInfo
from .state_collector import StateCollector
from .step_clock import StepClock

MAX_NAMES = 100
"""Most names of shipped processors with a label of their own."""

_MAX_NAME_LENGTH = 80
"""Characters."""

_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PHASE_BUCKETS = (0.00001, 0.000025, 0.00005, *_STEP_BUCKETS)
LOAD_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HTTP_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class EngineMetrics:
    """The Prometheus metrics of an engine.

    Counters that the engine has anyway are read at each scrape (`StateCollector`); histograms are observed here as
    things happen. Labels hold no client-supplied text except names of processors, whose number is bounded.

    Args:
        model: named in `logitship_info`.
        installed: digest → name of the installed processors.
        most_names: most names of shipped processors with a label of their own.

    Attributes:
        registry: all metrics, including those of the process.
        requests: metrics of requests, see `RequestMeter`.
        processor_load: seconds to load a processor at the admission of a request.
    """

    def __init__(self, model: ModelInfo, installed: Mapping[str, str], most_names: int = MAX_NAMES) -> None:
        self.registry = registry = CollectorRegistry()
        self._labels = ProcessorLabels(installed, most_names)
        self.requests = RequestMetrics(registry, self._labels)
        self._step = Histogram(
            "logitship_step_duration_seconds", "Time of a step.", registry=registry, buckets=_STEP_BUCKETS
        )
        phases = Histogram(
            "logitship_step_phase_duration_seconds",
            "Time of a phase of a step, in the steps that have the phase.",
            ["phase"],
            registry=registry,
            buckets=PHASE_BUCKETS,
        )
        self._phases = {phase.name: phases.labels(phase.name) for phase in StepClock().phases}
        self._step_rows = Histogram(
            "logitship_step_rows", "Rows of the batch in a step.", registry=registry, buckets=_ROW_BUCKETS
        )
        self._calls = ProcessorCalls(PHASE_BUCKETS)
        registry.register(self._calls)
        self.processor_load = Histogram(
            "logitship_processor_load_duration_seconds",
            "Time to load the processors of a request, at its admission.",
            registry=registry,
            buckets=LOAD_BUCKETS,
        )
        self._http = Counter(
            "logitship_http_requests",
            "HTTP requests that were answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._http_time = Histogram(
            "logitship_http_request_duration_seconds",
            "Time until the last byte of a response was sent.",
            ["route"],
            registry=registry,
            buckets=_HTTP_BUCKETS,
        )
        self._rate_limited = Counter(
            "logitship_rate_limited_requests",
            "HTTP requests that were refused because of a limit per minute.",
            ["limit"],
            registry=registry,
        )
        for limit in ("requests", "processor_loads"):
            self._rate_limited.labels(limit)
        Info("logitship", "The server and its model.", registry=registry).info(
            {"version": version("logitship"), "model": model.name, "dtype": model.dtype, "device": model.device}
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

    def watch(self, read: Callable[[], EngineStats]) -> None:
        """Add the metrics of an engine's state.

        Args:
            read: called for each scrape, on any thread.
        """
        self.registry.register(StateCollector(read))

    def step_ended(self, clock: StepClock) -> None:
        """Observe a step and reset the clock. Engine thread only; also called after a step that had nothing to do."""
        if clock.forward.seconds:
            total = 0.0
            for phase in clock.phases:
                if phase.seconds:
                    self._phases[phase.name].observe(phase.seconds)
                    total += phase.seconds
            self._step.observe(total)
            self._step_rows.observe(clock.num_rows)
        clock.reset()

    def call_observer(self, processor: LoadedProcessor) -> ObserveCall:
        """Return the function that takes each call of a processor. Engine thread only."""
        return self._calls.statistics(self._labels.label(processor.digest, processor.name)).observe

    def http_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Observe an HTTP response.

        Args:
            method: HTTP method, or a placeholder for unknown ones.
            route: path template of the route, or a placeholder for paths without a route.
            status: status code.
            seconds: time from the request until the last byte of the response.
        """
        self._http.labels(method, route, str(status)).inc()
        self._http_time.labels(route).observe(seconds)

    def rate_limited(self, limit: str) -> None:
        """Count an HTTP request that a limit per minute refused: `requests` or `processor_loads`."""
        self._rate_limited.labels(limit).inc()


class RequestMetrics:
    """The metrics that `RequestMeter` observes.

    A request is one prompt; a sequence is one of its `n` continuations.
    """

    def __init__(self, registry: CollectorRegistry, labels: ProcessorLabels) -> None:
        self.admitted = Counter("logitship_requests", "Requests that were admitted, one a prompt.", registry=registry)
        self.queue = Histogram(
            "logitship_request_queue_duration_seconds",
            "Time from a request's arrival until its first sequence got a slot.",
            registry=registry,
            buckets=_WAIT_BUCKETS,
        )
        self.first_token = Histogram(
            "logitship_time_to_first_token_seconds",
            "Time from a request's arrival until the first tokens of a sequence.",
            registry=registry,
            buckets=_WAIT_BUCKETS,
        )
        self.token_gap = Histogram(
            "logitship_inter_token_latency_seconds",
            "Time between two steps that gave a sequence tokens.",
            registry=registry,
            buckets=_TOKEN_GAP_BUCKETS,
        )
        self.duration = Histogram(
            "logitship_request_duration_seconds",
            "Time from a request's arrival until the end of a sequence.",
            registry=registry,
            buckets=_REQUEST_BUCKETS,
        )
        self.prompt_tokens = Counter(
            "logitship_prompt_tokens", "Tokens of prompts. A prompt counts once.", registry=registry
        )
        self.generation_tokens = Counter(
            "logitship_generation_tokens", "Tokens that were generated.", registry=registry
        )
        self.prompt_length = Histogram(
            "logitship_request_prompt_tokens",
            "Length of a prompt, in tokens.",
            registry=registry,
            buckets=_LENGTH_BUCKETS,
        )
        self.output_length = Histogram(
            "logitship_request_generation_tokens",
            "Length of a finished output, in tokens.",
            registry=registry,
            buckets=_LENGTH_BUCKETS,
        )
        self._finished = Counter(
            "logitship_sequences_finished",
            "Sequences that ended, by the reason: `stop`, `length`, `abort` (cancelled), `error`, or `absent` (a beam "
            "search that found fewer than requested).",
            ["reason"],
            registry=registry,
        )
        self._errors = Counter(
            "logitship_sequence_errors",
            "Sequences that were ended by an error, by its type.",
            ["type"],
            registry=registry,
        )
        self._faults = ProcessorFaults(labels)
        registry.register(self._faults)

    def finished(self, reason: FinishReason) -> None:
        """Observe the end of a sequence."""
        error = reason.error
        self._finished.labels("error" if error is not None else reason.kind).inc()
        if error is None:
            return
        self._errors.labels(error.type).inc()
        if error.digest is not None:
            self._faults.add(error.digest, error.name or "?", error.kind or "?")


class RequestMeter:
    """Observes one request, from its arrival to its end.

    Engine thread only, except for the constructor, `admitted`, and `delivered` when a shutdown fails the request.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._has_started = self._has_delivered = False
        self._last_tokens: dict[int, float] = {}
        """Time of the latest tokens, by sequence index."""

    def admitted(self) -> None:
        """Count the request as admitted."""
        self._metrics.admitted.inc()

    def started(self) -> None:
        """Observe that a sequence got its slot."""
        if not self._has_started:
            self._has_started = True
            self._metrics.queue.observe(time.perf_counter() - self._arrived)

    def delivered(self, chunks: Iterable[GenerationChunk]) -> None:
        """Observe the chunks of a step."""
        now = time.perf_counter()
        num_tokens = 0
        for chunk in chunks:
            if not self._has_delivered:
                self._has_delivered = True
                self._metrics.prompt_tokens.inc(chunk.prompt_tokens)
                self._metrics.prompt_length.observe(chunk.prompt_tokens)
            if chunk.token_ids:
                num_tokens += len(chunk.token_ids)
                self._observe_latency(chunk.index, now)
            if chunk.finish_reason is not None:
                self._metrics.finished(chunk.finish_reason)
                self._metrics.output_length.observe(chunk.completion_tokens)
                self._metrics.duration.observe(now - self._arrived)
        self._metrics.generation_tokens.inc(num_tokens)

    def _observe_latency(self, index: int, now: float) -> None:
        last = self._last_tokens.get(index)
        if last is None:
            self._metrics.first_token.observe(now - self._arrived)
        elif last != now:  # accepted drafts arrive in one step
            self._metrics.token_gap.observe(now - last)
        self._last_tokens[index] = now


@dataclass(frozen=True)
class ProcessorLabel:
    """The labels of a processor.

    Attributes:
        name: its name, truncated; or `OTHER`.
        origin: `installed`, or `shipped` by a request (or a callable that one names). It tells a shipped processor from
            an installed one of the same name.
    """

    name: str
    origin: Literal["installed", "shipped"]


class ProcessorLabels:
    """Assigns labels to processors. Not thread-safe.

    Args:
        installed: digest → name of the installed processors.
        most_names: how many names of shipped processors get a label of their own, first come, first served.
    """

    def __init__(self, installed: Mapping[str, str], most_names: int = MAX_NAMES) -> None:
        self._installed = {digest: ProcessorLabel(name, "installed") for digest, name in installed.items()}
        self._shipped: dict[str, ProcessorLabel] = {}
        self._most_names = most_names
        self._other = ProcessorLabel(OTHER, "shipped")

    def label(self, digest: str, name: str) -> ProcessorLabel:
        """Return the label of a processor: the same object for the same label."""
        installed = self._installed.get(digest)
        if installed is not None:
            return installed
        name = name[:_MAX_NAME_LENGTH]
        known = self._shipped.get(name)
        if known is None:
            if len(self._shipped) >= self._most_names:
                return self._other
            known = self._shipped[name] = ProcessorLabel(name, "shipped")
        return known


@cache
def _bound_names(bounds: tuple[float, ...]) -> list[str]:
    return [*map(floatToGoString, bounds), "+Inf"]


class CallStatistics:
    """Statistics of the calls with one label. Written by one thread, without a lock.

    Args:
        bounds: upper bounds of the histogram's buckets, in seconds, ascending. A last bucket has no bound.

    Attributes:
        counts: calls in each bucket.
        seconds: total duration.
        rows: total rows.
        logits_uses: calls by their use of the logits.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0
        self.rows = 0
        self.logits_uses: dict[LogitsUse, int] = dict.fromkeys(get_args(LogitsUse), 0)

    def observe(self, num_rows: int, seconds: float, logits_use: LogitsUse = "given") -> None:
        """Count a call."""
        self.logits_uses[logits_use] += 1
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds
        self.rows += num_rows

    def buckets(self) -> list[tuple[str, int]]:
        """Return the cumulative counts by upper bound, as `HistogramMetricFamily` takes them."""
        return list(zip(_bound_names(tuple(self._bounds)), accumulate(self.counts), strict=True))


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
        uses = CounterMetricFamily(
            "logitship_processor_calls",
            "Calls of a processor, by logits: given at the start, or promised and then read or unread.",
            labels=["processor", "origin", "logits"],
        )
        for label, calls in list(self._by_label.items()):
            labels = [label.name, label.origin]
            durations.add_metric(labels, calls.buckets(), calls.seconds)
            rows.add_metric(labels, calls.rows)
            for use, count in calls.logits_uses.items():
                uses.add_metric([*labels, use], count)
        yield durations
        yield rows
        yield uses


class ProcessorFaults(Collector):
    """Counts the sequences that were ended by a fault of a processor. Thread-safe, except for the labels.

    Args:
        labels: assigns labels to processors.
    """

    def __init__(self, labels: ProcessorLabels) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], int] = {}

    def add(self, digest: str, name: str, kind: str) -> None:
        """Count a sequence."""
        label = self._labels.label(digest, name)
        key = (label.name, label.origin, kind)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """Return the current metric. Any thread."""
        faults = CounterMetricFamily(
            "logitship_processor_faults",
            "Sequences that were ended by a fault of a processor, by its kind.",
            labels=["processor", "origin", "kind"],
        )
        with self._lock:
            counts = dict(self._counts)
        for key, count in counts.items():
            faults.add_metric([*key], count)
        yield faults
