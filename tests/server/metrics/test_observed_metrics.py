from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from logitship.sampler.processors.executor import DisabledExecutor, LoadedProcessor
from logitship.server.metrics.engine_stats import EngineStats, ModelInfo
from logitship.server.metrics.observed_metrics import (
    EngineMetrics,
    ProcessorCalls,
    ProcessorLabel,
    ProcessorLabels,
    RequestMeter,
    RequestMetrics,
)
from logitship.server.metrics.step_clock import StepClock
from logitship.server.requests.messages import ABSENT, FinishReason, GenerationChunk, RequestError

from .conftest import Read, Time

MODEL = ModelInfo("tiny", "/secret/path", 8, 64, frozenset({1}), "float32", "cpu", "Tiny")
STATS = EngineStats(
    running=3,
    waiting=2,
    steps=7,
    accepting=True,
    processor_cache_hits=11,
    processor_cache_misses=12,
    processor_cache_evictions=13,
    processor_cache_entries=14,
    processor_cache_bytes=15,
    prefix_tokens_asked=31,
    prefix_tokens_found=32,
    prefix_blocks=33,
    prefix_blocks_capacity=34,
    registered_processors=16,
    drafted=17,
    accepted=18,
    forced=6,
    sandboxes=19,
    sandboxes_started=20,
    sandboxes_ended={"crash": 1, "unloaded": 4},
    deferred_calls=5,
    tenant_step_seconds={"a": 1.5, "b": 0.25},
    loads_running=41,
    loads_waiting=42,
    artifact_bytes=43,
    grammar_checks_running=44,
    grammar_checks_waiting=45,
    grammar_failures=46,
)


@pytest.fixture
def metrics() -> EngineMetrics:
    metrics = EngineMetrics(MODEL, {"sha256:1": "grammar"})
    metrics.watch(lambda: STATS)
    return metrics


@pytest.fixture
def engine_read(metrics: EngineMetrics) -> Read:
    return lambda name, **labels: metrics.registry.get_sample_value(f"logitship_{name}", labels)


def processor(digest: str, name: str) -> LoadedProcessor:
    return LoadedProcessor(digest, name, DisabledExecutor("none"), None)


def stepped(clock: StepClock, **seconds: float) -> StepClock:
    """Return the clock after a step with these phases."""
    for name, each in seconds.items():
        getattr(clock, name).seconds = each
    return clock


def test_step_and_phases(metrics: EngineMetrics, engine_read: Read) -> None:
    clock = StepClock()
    clock.num_rows = 5
    metrics.step_ended(stepped(clock, schedule=0.25, forward=1.0, processors=0.5))
    assert (engine_read("step_duration_seconds_count"), engine_read("step_duration_seconds_sum")) == (1, 1.75)
    assert engine_read("step_phase_duration_seconds_sum", phase="forward") == 1
    assert engine_read("step_phase_duration_seconds_count", phase="processors") == 1
    assert engine_read("step_phase_duration_seconds_count", phase="sample") == 0
    assert engine_read("step_rows_sum") == 5
    assert clock.forward.seconds == clock.num_rows == 0


def test_idle_steps_are_not_counted(metrics: EngineMetrics, engine_read: Read) -> None:
    clock = stepped(StepClock(), schedule=0.25, deliver=0.125)
    metrics.step_ended(clock)
    metrics.step_ended(stepped(clock, forward=1.0))
    assert engine_read("step_duration_seconds_sum") == 1
    assert engine_read("step_phase_duration_seconds_count", phase="schedule") == 0


def test_processor_calls(metrics: EngineMetrics, engine_read: Read) -> None:
    metrics.call_observer(processor("sha256:1", "grammar"))(3, 0.5)
    metrics.call_observer(processor("sha256:2", "Mine"))(1, 0.25)
    metrics.call_observer(processor("sha256:3", "Mine"))(2, 0.25)
    mine = {"processor": "Mine", "origin": "shipped"}
    assert engine_read("processor_call_duration_seconds_sum", processor="grammar", origin="installed") == 0.5
    assert engine_read("processor_rows_total", processor="grammar", origin="installed") == 3
    assert engine_read("processor_call_duration_seconds_count", **mine) == 2
    assert engine_read("processor_rows_total", **mine) == 3


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


def test_http_requests(metrics: EngineMetrics, engine_read: Read) -> None:
    metrics.http_answered("GET", "/v1/models/{name}", 404, 0.5)
    assert engine_read("http_requests_total", method="GET", route="/v1/models/{name}", status="404") == 1
    assert engine_read("http_request_duration_seconds_sum", route="/v1/models/{name}") == 0.5


def test_engine_stats_are_read_at_each_scrape(engine_read: Read) -> None:
    names = (
        "running_sequences waiting_sequences steps_total accepting processor_cache_hits_total "
        "processor_cache_misses_total processor_cache_evictions_total processor_cache_entries processor_cache_bytes "
        "prefix_cache_queried_tokens_total prefix_cache_hit_tokens_total prefix_cache_blocks "
        "prefix_cache_capacity_blocks "
        "registered_processors draft_tokens_total accepted_draft_tokens_total sandboxes sandboxes_started_total"
    )
    assert [engine_read(name) for name in names.split()] == [3, 2, 7, 1, *range(11, 16), *range(31, 35), *range(16, 21)]
    assert [engine_read(f"processor_loads_{state}") for state in ("running", "waiting")] == [41, 42]
    assert [engine_read(f"grammar_{name}") for name in ("checks_running", "checks_waiting", "failures_total")] == [
        *(44, 45, 46)
    ]
    assert [engine_read("sandboxes_ended_total", reason=reason) for reason in ("crash", "unloaded")] == [1, 4]
    assert engine_read("deferred_calls_total") == 5
    assert engine_read("forced_tokens_total") == 6
    assert engine_read("artifact_bytes") == 43
    assert [engine_read("tenant_step_seconds_total", tenant=tenant) for tenant in ("a", "b")] == [1.5, 0.25]


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


INSTALLED = {"sha256:1": "grammar"}


def test_installed_processor_keeps_its_name() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=0)
    assert labels.label("sha256:1", "any name") == ProcessorLabel("grammar", "installed")


def test_shipped_processor_with_installed_name() -> None:
    assert ProcessorLabels(INSTALLED).label("sha256:2", "grammar") == ProcessorLabel("grammar", "shipped")


def test_number_of_names_is_limited() -> None:
    labels = ProcessorLabels(INSTALLED, most_names=2)
    found = [labels.label(f"sha256:{name}", name).name for name in ("A", "B", "C", "A", "D", "B")]
    assert found == ["A", "B", "other", "A", "other", "B"]


def test_same_name_shares_a_label() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert labels.label("sha256:2", "A") is labels.label("sha256:3", "A")


def test_long_names_are_truncated() -> None:
    labels = ProcessorLabels({}, most_names=1)
    assert len(labels.label("sha256:2", "A" * 200).name) == 80
    assert labels.label("sha256:3", "A" * 300).name == "A" * 80


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


@pytest.fixture
def request_metrics(registry: CollectorRegistry) -> RequestMetrics:
    return RequestMetrics(registry, ProcessorLabels({"sha256:1": "grammar"}))


def chunk(*token_ids: int, index: int = 0, total: int = 0, ends: FinishReason | None = None) -> GenerationChunk:
    values: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": total, "finish_reason": ends}
    return GenerationChunk(index=index, text="", token_ids=list(token_ids), **values)


def test_request_lifecycle(request_metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(request_metrics)
    meter.admitted()
    time.now += 0.25
    meter.started()
    time.now += 0.25
    meter.delivered([chunk(1)])
    time.now += 1
    meter.delivered([chunk(2)])
    time.now += 2
    meter.delivered([chunk(3, total=3, ends=FinishReason("length"))])
    assert read("requests_total") == 1
    assert read("request_queue_duration_seconds_sum") == 0.25
    assert read("time_to_first_token_seconds_sum") == 0.5
    assert (read("inter_token_latency_seconds_count"), read("inter_token_latency_seconds_sum")) == (2, 3)
    assert read("request_duration_seconds_sum") == 3.5
    assert (read("prompt_tokens_total"), read("generation_tokens_total")) == (7, 3)
    assert (read("request_prompt_tokens_sum"), read("request_generation_tokens_sum")) == (7, 3)
    assert read("sequences_finished_total", reason="length") == 1


def test_continuations_share_prompt_and_queue_time(request_metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(request_metrics)
    meter.started()
    time.now += 1
    meter.started()
    meter.delivered([chunk(1, index=0), chunk(1, index=1)])
    time.now += 1
    ends = FinishReason("stop", 1)
    meter.delivered([chunk(2, index=0, total=2, ends=ends), chunk(2, index=1, total=2, ends=ends)])
    assert (read("request_queue_duration_seconds_count"), read("request_queue_duration_seconds_sum")) == (1, 0)
    assert (read("time_to_first_token_seconds_count"), read("inter_token_latency_seconds_count")) == (2, 2)
    assert (read("prompt_tokens_total"), read("generation_tokens_total")) == (7, 4)
    assert read("sequences_finished_total", reason="stop") == 2


def test_accepted_drafts_have_no_latency(request_metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(request_metrics)
    meter.delivered([chunk(1), chunk(2)])
    time.now += 1
    meter.delivered([chunk(3), chunk(4), chunk(5)])
    assert (read("time_to_first_token_seconds_count"), read("inter_token_latency_seconds_count")) == (1, 1)
    assert read("generation_tokens_total") == 5


def test_request_without_output(request_metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(request_metrics)
    meter.delivered([chunk(ends=FinishReason("abort")), chunk(index=1, ends=ABSENT)])
    assert read("time_to_first_token_seconds_count") == 0
    assert read("prompt_tokens_total") == 7
    assert read("sequences_finished_total", reason="abort") == 1
    assert read("sequences_finished_total", reason="absent") == 1


def fault(name: str, digest: str = "sha256:2", kind: str = "exception") -> FinishReason:
    error = RequestError("ProcessorFault", "secret", 400, "secret", digest, name, kind)
    return FinishReason("abort", error=error)


def test_faults_by_processor_and_kind(request_metrics: RequestMetrics, read: Read) -> None:
    for reason in (fault("Bad"), fault("Bad"), fault("Bad", kind="deadline"), fault("grammar", "sha256:1")):
        RequestMeter(request_metrics).delivered([chunk(ends=reason)])
    assert read("sequences_finished_total", reason="error") == 4
    assert read("sequence_errors_total", type="ProcessorFault") == 4
    assert read("processor_faults_total", processor="Bad", origin="shipped", kind="exception") == 2
    assert read("processor_faults_total", processor="Bad", origin="shipped", kind="deadline") == 1
    assert read("processor_faults_total", processor="grammar", origin="installed", kind="exception") == 1


def test_error_without_processor(request_metrics: RequestMetrics, read: Read, registry: CollectorRegistry) -> None:
    error = RequestError("NoTokenLeftError", "no token is left", 400)
    RequestMeter(request_metrics).delivered([chunk(ends=FinishReason("abort", error=error))])
    assert read("sequence_errors_total", type="NoTokenLeftError") == 1
    assert b"logitship_processor_faults_total{" not in generate_latest(registry)


def test_names_are_escaped(request_metrics: RequestMetrics, registry: CollectorRegistry) -> None:
    names = {'quote"', "back\\slash", "line\nfeed", "ümläut 🎈", "", "}", "a,b=c"}
    for name in names:
        request_metrics.finished(fault(name))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    read_back = {each.labels["processor"] for each in samples if each.name == "logitship_processor_faults_total"}
    assert read_back == (names - {""}) | {"?"}


def test_error_messages_are_not_exported(request_metrics: RequestMetrics, registry: CollectorRegistry) -> None:
    request_metrics.finished(fault("Bad"))
    assert b"secret" not in generate_latest(registry)
