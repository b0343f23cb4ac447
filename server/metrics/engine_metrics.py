"""Prometheus metrics of an engine and its HTTP server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ObserveCall

from .engine_stats import EngineStats, ModelInfo
from .request_metrics import MOST_NAMES, ProcessorCalls, ProcessorLabels, RequestMetrics
from .state_collector import StateCollector
from .step_clock import StepClock

_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_PHASE_BUCKETS = (0.00001, 0.000025, 0.00005, *_STEP_BUCKETS)
_LOAD_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
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

    def __init__(self, model: ModelInfo, installed: Mapping[str, str], most_names: int = MOST_NAMES) -> None:
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
            buckets=_PHASE_BUCKETS,
        )
        self._phases = {phase.name: phases.labels(phase.name) for phase in StepClock().phases}
        self._step_rows = Histogram(
            "logitship_step_rows", "Rows of the batch in a step.", registry=registry, buckets=_ROW_BUCKETS
        )
        self._calls = ProcessorCalls(_PHASE_BUCKETS)
        registry.register(self._calls)
        self.processor_load = Histogram(
            "logitship_processor_load_duration_seconds",
            "Time to load the processors of a request, at its admission.",
            registry=registry,
            buckets=_LOAD_BUCKETS,
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
