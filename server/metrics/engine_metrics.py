"""Metrics of one engine and of its HTTP front, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from logitship.sampler.processors.executor import LoadedProcessor

from .engine_stats import EngineStats, ModelInfo
from .processor_calls import ProcessorCalls
from .processor_labels import ProcessorLabels
from .request_metrics import RequestMetrics
from .state_collector import StateCollector
from .step_clock import StepClock

_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_PHASE_BUCKETS = (0.00001, 0.000025, 0.00005, *_STEP_BUCKETS)
_LOAD_BUCKETS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HTTP_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class EngineMetrics:
    """What Prometheus is told of an engine.

    What the engine counts anyway is read when somebody asks (`StateCollector`); what has a distribution is observed
    here when it happens. No label holds what a client wrote, but for names of processors, of which there is a bounded
    number.

    Args:
        model: named in `logitship_info`.
        installed: digest → name of the installed processors.

    Attributes:
        registry: all of the metrics, those of the process included.
        requests: observes requests, see `RequestMeter`.
        processor_load: seconds that it took to get a request's processors ready.
    """

    def __init__(self, model: ModelInfo, installed: Mapping[str, str]) -> None:
        self.registry = registry = CollectorRegistry()
        self._labels = ProcessorLabels(installed)
        self.requests = RequestMetrics(registry, self._labels)
        self._step = Histogram(
            "logitship_step_duration_seconds", "Time of a step.", registry=registry, buckets=_STEP_BUCKETS
        )
        phases = Histogram(
            "logitship_step_phase_duration_seconds",
            "Time of a phase of a step, in the steps that have it.",
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
            "Time to get the processors of a request ready, at its admission.",
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
            "Time until the last byte of an answer was sent.",
            ["route"],
            registry=registry,
            buckets=_HTTP_BUCKETS,
        )
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
        """Observe a step, and begin the next. On the engine's thread, also after a step that had nothing to do."""
        if clock.forward.seconds:
            total = 0.0
            for phase in clock.phases:
                if phase.seconds:
                    self._phases[phase.name].observe(phase.seconds)
                    total += phase.seconds
            self._step.observe(total)
            self._step_rows.observe(clock.num_rows)
        clock.reset()

    def observer_of_calls(self, processor: LoadedProcessor) -> Callable[[int, float], None]:
        """What takes the number of rows and the seconds of each call of a processor. On the engine's thread, as it."""
        return self._calls.of(self._labels.of(processor.digest, processor.name)).observe

    def http_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Observe an answer.

        Args:
            method: a method of HTTP, or what stands for others.
            route: the path of the route, with its parameters' names; or what stands for paths without a route.
        """
        self._http.labels(method, route, str(status)).inc()
        self._http_time.labels(route).observe(seconds)
