from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from logitship.server.metrics import request_metrics
from logitship.server.metrics.request_metrics import (
    ProcessorCalls,
    ProcessorLabel,
    ProcessorLabels,
    RequestMeter,
    RequestMetrics,
)
from logitship.server.requests.messages import ABSENT, FinishReason, GenerationChunk, RequestError

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


Read = Callable[..., float | None]


class Time:
    """Replaces the module `time`; the test sets the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(request_metrics, "time", time)
    return time


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RequestMetrics:
    return RequestMetrics(registry, ProcessorLabels({"sha256:1": "grammar"}))


def chunk(*token_ids: int, index: int = 0, total: int = 0, ends: FinishReason | None = None) -> GenerationChunk:
    values: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": total, "finish_reason": ends}
    return GenerationChunk(index=index, text="", token_ids=list(token_ids), **values)


def test_request_lifecycle(metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(metrics)
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


def test_continuations_share_prompt_and_queue_time(metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(metrics)
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


def test_accepted_drafts_have_no_latency(metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(metrics)
    meter.delivered([chunk(1), chunk(2)])
    time.now += 1
    meter.delivered([chunk(3), chunk(4), chunk(5)])
    assert (read("time_to_first_token_seconds_count"), read("inter_token_latency_seconds_count")) == (1, 1)
    assert read("generation_tokens_total") == 5


def test_request_without_output(metrics: RequestMetrics, read: Read, time: Time) -> None:
    meter = RequestMeter(metrics)
    meter.delivered([chunk(ends=FinishReason("abort")), chunk(index=1, ends=ABSENT)])
    assert read("time_to_first_token_seconds_count") == 0
    assert read("prompt_tokens_total") == 7
    assert read("sequences_finished_total", reason="abort") == 1
    assert read("sequences_finished_total", reason="absent") == 1


def fault(name: str, digest: str = "sha256:2", kind: str = "exception") -> FinishReason:
    error = RequestError("ProcessorFault", "secret", 400, "secret", digest, name, kind)
    return FinishReason("abort", error=error)


def test_faults_by_processor_and_kind(metrics: RequestMetrics, read: Read) -> None:
    for reason in (fault("Bad"), fault("Bad"), fault("Bad", kind="deadline"), fault("grammar", "sha256:1")):
        RequestMeter(metrics).delivered([chunk(ends=reason)])
    assert read("sequences_finished_total", reason="error") == 4
    assert read("sequence_errors_total", type="ProcessorFault") == 4
    assert read("processor_faults_total", processor="Bad", origin="shipped", kind="exception") == 2
    assert read("processor_faults_total", processor="Bad", origin="shipped", kind="deadline") == 1
    assert read("processor_faults_total", processor="grammar", origin="installed", kind="exception") == 1


def test_error_without_processor(metrics: RequestMetrics, read: Read, registry: CollectorRegistry) -> None:
    error = RequestError("NoTokenLeftError", "no token is left", 400)
    RequestMeter(metrics).delivered([chunk(ends=FinishReason("abort", error=error))])
    assert read("sequence_errors_total", type="NoTokenLeftError") == 1
    assert b"logitship_processor_faults_total{" not in generate_latest(registry)


def test_names_are_escaped(metrics: RequestMetrics, registry: CollectorRegistry) -> None:
    names = {'quote"', "back\\slash", "line\nfeed", "ümläut 🎈", "", "}", "a,b=c"}
    for name in names:
        metrics.finished(fault(name))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    read_back = {each.labels["processor"] for each in samples if each.name == "logitship_processor_faults_total"}
    assert read_back == (names - {""}) | {"?"}


def test_error_messages_are_not_exported(metrics: RequestMetrics, registry: CollectorRegistry) -> None:
    metrics.finished(fault("Bad"))
    assert b"secret" not in generate_latest(registry)
