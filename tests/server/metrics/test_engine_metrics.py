from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from logitship.sampler.processors.executor import DisabledExecutor, LoadedProcessor
from logitship.server.metrics.engine_metrics import EngineMetrics
from logitship.server.metrics.engine_stats import EngineStats, ModelInfo
from logitship.server.metrics.step_clock import StepClock

Read = Callable[..., float | None]

MODEL = ModelInfo("tiny", "/secret/path", 8, 64, frozenset({1}), "float32", "cpu", "Tiny")
STATS = EngineStats(
    *(3, 2, 7, True, *range(11, 16), *range(31, 35), *range(16, 19)),
    forced=6,
    sandboxes=19,
    sandboxes_started=20,
    sandboxes_ended={"crash": 1, "unloaded": 4},
    deferred_calls=5,
    tenant_step_seconds={"a": 1.5, "b": 0.25},
    loads_running=41,
    loads_waiting=42,
    artifact_bytes=43,
)


@pytest.fixture
def metrics() -> EngineMetrics:
    metrics = EngineMetrics(MODEL, {"sha256:1": "grammar"})
    metrics.watch(lambda: STATS)
    return metrics


@pytest.fixture
def read(metrics: EngineMetrics) -> Read:
    return lambda name, **labels: metrics.registry.get_sample_value(f"logitship_{name}", labels)


def processor(digest: str, name: str) -> LoadedProcessor:
    return LoadedProcessor(digest, name, DisabledExecutor("none"), None)


def stepped(clock: StepClock, **seconds: float) -> StepClock:
    """Return the clock after a step with these phases."""
    for name, each in seconds.items():
        getattr(clock, name).seconds = each
    return clock


def test_step_and_phases(metrics: EngineMetrics, read: Read) -> None:
    clock = StepClock()
    clock.num_rows = 5
    metrics.step_ended(stepped(clock, schedule=0.25, forward=1.0, processors=0.5))
    assert (read("step_duration_seconds_count"), read("step_duration_seconds_sum")) == (1, 1.75)
    assert read("step_phase_duration_seconds_sum", phase="forward") == 1
    assert read("step_phase_duration_seconds_count", phase="processors") == 1
    assert read("step_phase_duration_seconds_count", phase="sample") == 0
    assert read("step_rows_sum") == 5
    assert clock.forward.seconds == clock.num_rows == 0


def test_idle_steps_are_not_counted(metrics: EngineMetrics, read: Read) -> None:
    clock = stepped(StepClock(), schedule=0.25, deliver=0.125)
    metrics.step_ended(clock)
    metrics.step_ended(stepped(clock, forward=1.0))
    assert read("step_duration_seconds_sum") == 1
    assert read("step_phase_duration_seconds_count", phase="schedule") == 0


def test_processor_calls(metrics: EngineMetrics, read: Read) -> None:
    metrics.call_observer(processor("sha256:1", "grammar"))(3, 0.5)
    metrics.call_observer(processor("sha256:2", "Mine"))(1, 0.25)
    metrics.call_observer(processor("sha256:3", "Mine"))(2, 0.25)
    mine = {"processor": "Mine", "origin": "shipped"}
    assert read("processor_call_duration_seconds_sum", processor="grammar", origin="installed") == 0.5
    assert read("processor_rows_total", processor="grammar", origin="installed") == 3
    assert read("processor_call_duration_seconds_count", **mine) == 2
    assert read("processor_rows_total", **mine) == 3


def test_number_of_series_is_bounded(metrics: EngineMetrics) -> None:
    before = len(generate_latest(metrics.registry).splitlines())
    for number in range(1000):
        metrics.call_observer(processor(f"sha256:{number + 2}", f"P{number}"))(1, 0.0)
    names = {
        sample.labels["processor"]
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if "processor" in sample.labels
    }
    assert len(names) == 101
    assert "other" in names
    assert len(generate_latest(metrics.registry).splitlines()) - before < 101 * 30


def test_http_requests(metrics: EngineMetrics, read: Read) -> None:
    metrics.http_answered("GET", "/v1/models/{name}", 404, 0.5)
    assert read("http_requests_total", method="GET", route="/v1/models/{name}", status="404") == 1
    assert read("http_request_duration_seconds_sum", route="/v1/models/{name}") == 0.5


def test_engine_stats_are_read_at_each_scrape(read: Read) -> None:
    names = (
        "running_sequences waiting_sequences steps_total accepting processor_cache_hits_total "
        "processor_cache_misses_total processor_cache_evictions_total processor_cache_entries processor_cache_bytes "
        "prefix_cache_queried_tokens_total prefix_cache_hit_tokens_total prefix_cache_blocks "
        "prefix_cache_capacity_blocks "
        "registered_processors draft_tokens_total accepted_draft_tokens_total sandboxes sandboxes_started_total"
    )
    assert [read(name) for name in names.split()] == [3, 2, 7, 1, *range(11, 16), *range(31, 35), *range(16, 21)]
    assert [read(f"processor_loads_{state}") for state in ("running", "waiting")] == [41, 42]
    assert [read("sandboxes_ended_total", reason=reason) for reason in ("crash", "unloaded")] == [1, 4]
    assert read("deferred_calls_total") == 5
    assert read("forced_tokens_total") == 6
    assert read("artifact_bytes") == 43
    assert [read("tenant_step_seconds_total", tenant=tenant) for tenant in ("a", "b")] == [1.5, 0.25]


def test_model_path_is_not_exported(metrics: EngineMetrics) -> None:
    text = generate_latest(metrics.registry).decode()
    assert 'model="tiny"' in text
    assert "/secret" not in text
    assert "process_cpu_seconds_total" in text


def test_engines_have_separate_registries() -> None:
    one, other = (EngineMetrics(replace(MODEL, name=name), {}) for name in ("one", "other"))
    one.requests.admitted.inc()
    assert one.registry.get_sample_value("logitship_requests_total") == 1
    assert other.registry.get_sample_value("logitship_requests_total") == 0


def test_scrape_while_metrics_are_updated(metrics: EngineMetrics) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def scrape() -> None:
        try:
            while not stop.is_set():
                generate_latest(metrics.registry)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=scrape)
    thread.start()
    for number in range(300):
        metrics.call_observer(processor(f"sha256:{number + 2}", f"P{number}"))(1, 0.0)
        metrics.http_answered("GET", f"/{number}", 200, 0.1)
    stop.set()
    thread.join()
    assert errors == []
