"""The metrics that an engine's front end returns for all its processes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from logitship.builtin_processors.registry import Registry
from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.executor import DisabledExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.metrics.engine_stats import MAX_TENANTS, ProcessorStats
from logitship.server.runtime.allowances import Allowances
from logitship.server.runtime.fault_message import fault_details
from logitship.server.runtime.plugin_metrics import MetricsFile, PluginMetrics, SummedMetrics, register
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.shared_directory import SHARED_DIRECTORY, make_shared_directory
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.vllm.settings import VllmSettings
from tests.server.processors.paused_executor import PausedExecutor

from .fake_engine import Job, PluginEngine
from .fake_engines import BATCHED, Transformers
from .test_plugin_processors import shipped

logger = logging.getLogger(__name__)


class Fixed(Collector):
    """Metrics with fixed values."""

    def __init__(self, calls: float, sandboxes: float) -> None:
        self.calls = calls
        self.sandboxes = sandboxes

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily("logitship_processor_calls", "Calls.", labels=["processor"])
        calls.add_metric(["A"], self.calls)
        return [calls, GaugeMetricFamily("logitship_sandboxes", "Sandboxes.", self.sandboxes)]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the metrics of all engines. Files are written only when the test does."""
    for variable in (SHARED_DIRECTORY, "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(MetricsFile, "start", lambda file: None)
    return tmp_path


def read(collector: Collector, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry.get_sample_value(f"logitship_{name}", labels)


@pytest.mark.parametrize("engine", BATCHED, ids=lambda each: each.__name__)
def test_calls_and_faults_of_requests_are_counted(engine: type[PluginEngine], directory: Path) -> None:
    fake = engine()
    fake.run(0, Job("runs"), Job("fails", fails_at=2), Job("broken", processor='{"name": "nothing"}'))
    metrics = fake.processors.metrics
    assert metrics is not None
    checks = {"processor": "ChecksHistory", "origin": "shipped"}
    calls = read(metrics, "processor_call_duration_seconds_count", **checks)
    assert calls is not None
    assert calls > 2
    assert (read(metrics, "processor_rows_total", **checks) or 0) >= calls
    assert read(metrics, "processor_faults_total", kind="exception", **checks) == 1
    assert (read(metrics, "tenant_step_seconds_total", tenant="") or 0) > 0
    assert (read(metrics, "processor_cache_misses_total") or 0) >= 1
    assert read(metrics, "deferred_calls_total") == 0


@pytest.mark.parametrize("engine", [*BATCHED, Transformers], ids=lambda each: each.__name__)
def test_engine_without_metrics_has_none(engine: type[PluginEngine]) -> None:
    fake = engine()
    fake.run(0, Job("runs"))
    assert fake.processors.metrics is None


def test_log_line_of_a_fault_names_tenant_and_digest() -> None:
    request = TrackedRequest(None, "rid", [], tenant="3fa9", requested=shipped("A"))
    digest = request.requested[0].string.digest  # type: ignore[union-attr]
    assert fault_details(request) == f" (tenant 3fa9, processor {digest})"
    request.fault = ProcessorFault("", digest="sha256:1", name="A", kind="crash")
    assert fault_details(request) == " (tenant 3fa9, processor sha256:1)"
    assert fault_details(TrackedRequest(None, "rid", [])) == ""


@pytest.mark.parametrize("engine", BATCHED, ids=lambda each: each.__name__)
def test_fault_is_logged_with_the_digest(engine: type[PluginEngine]) -> None:
    fake = engine()
    fake.run(0, Job("fails", fails_at=2))
    assert re.match(r"request fails ends(, if .*)? \(processor sha256:\w+\): ", fake.ends["fails"])


def test_several_tenants_do_not_read_the_names_of_classes(directory: Path) -> None:
    for settings, name in (
        (VllmSettings(), "Mine"),
        (VllmSettings(num_tenants=2), "other"),
        (VllmSettings(tenant_header="x-tenant"), "other"),
        (SglangSettings(shipping_api_key=("a",)), "Mine"),
        (SglangSettings(shipping_api_key=("a", "b")), "other"),
        (SglangSettings(tenant_header="x-tenant"), "other"),
    ):
        processors = PluginProcessors(
            settings,
            ModelView(10, frozenset({0}), None),
            Registry(()),
            DisabledExecutor("off"),
            max_entries=1,
            params_checker=None,
        )
        processors.start_metrics(logger)
        assert processors.metrics is not None
        processors.metrics.failed(ProcessorFault("", digest="sha256:1", name="Mine", kind="crash"))
        assert read(processors.metrics, "processor_faults_total", processor=name, origin="shipped", kind="crash") == 1


async def test_front_end_observes_loads(directory: Path) -> None:
    executor = PausedExecutor()
    model = ModelView(10, frozenset({0}), None)
    processors = PluginProcessors(SglangSettings(), model, Registry(()), executor, max_entries=9, params_checker=None)
    processors.start_metrics(logger)
    metrics = processors.metrics
    assert metrics is not None
    check = asyncio.create_task(processors.check(shipped("A"), "a"))
    await executor.until_began(("a", "A"))
    assert read(metrics, "processor_loads_running") == 1
    executor.end("a", "A")
    await check
    assert read(metrics, "processor_load_duration_seconds_count") == 1
    assert read(metrics, "processor_loads_running") == 0
    assert read(metrics, "processor_cache_entries") == 0  # it keeps verdicts, and not classes


def test_processes_are_summed(tmp_path: Path) -> None:
    for fixed in (Fixed(1, 2), Fixed(10, 20)):
        MetricsFile(str(tmp_path), fixed, logger).write()
    (tmp_path / "logitship-1-broken.json").write_text("[")
    summed = SummedMetrics(str(tmp_path))
    assert read(summed, "processor_calls_total", processor="A") == 11
    assert read(summed, "sandboxes") == 22


def test_process_that_has_ended_keeps_its_counters(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    MetricsFile(str(tmp_path), Fixed(1, 2), logger).write()
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / f"logitship-{ended.pid}-0.json")
    MetricsFile(str(tmp_path), Fixed(10, 20), logger).write()
    summed = SummedMetrics(str(tmp_path))
    assert read(summed, "processor_calls_total", processor="A") == 11
    assert read(summed, "sandboxes") == 20


def test_file_is_written_in_a_thread(tmp_path: Path) -> None:
    MetricsFile(str(tmp_path), Fixed(1, 2), logger).start()
    while not list(tmp_path.glob("*.json")):
        os.sched_yield()
    assert read(SummedMetrics(str(tmp_path)), "processor_calls_total", processor="A") == 1


def test_file_is_written_only_if_it_changes(tmp_path: Path) -> None:
    metrics = Fixed(1, 2)
    file = MetricsFile(str(tmp_path), metrics, logger)
    file.write()
    (written,) = tmp_path.iterdir()
    before = written.stat().st_mtime_ns
    file.write()
    assert written.stat().st_mtime_ns == before
    metrics.calls = 5
    file.write()
    assert read(SummedMetrics(str(tmp_path)), "processor_calls_total", processor="A") == 5


def test_registry_gets_the_metrics_once(tmp_path: Path) -> None:
    MetricsFile(str(tmp_path), Fixed(1, 2), logger).write()
    registry = CollectorRegistry()
    register(registry, str(tmp_path))
    register(registry, str(tmp_path))
    assert [metric.name for metric in registry.collect()] == ["logitship_processor_calls", "logitship_sandboxes"]


def test_multiprocess_mode_does_not_export_them_itself(tmp_path: Path) -> None:
    code = """
from logitship.client.errors import ProcessorFault
from logitship.server.metrics.engine_stats import ProcessorStats
from logitship.server.runtime.fault_message import fault_details
from logitship.server.runtime.plugin_metrics import PluginMetrics
metrics = PluginMetrics({}, 9, ProcessorStats)
metrics.failed(ProcessorFault("", digest="sha256:1", name="A", kind="crash"))
metrics.loaded(1.0)
print(len([*metrics.collect()]))
"""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert int(found.stdout) == len([*PluginMetrics({}, 9, ProcessorStats).collect()])
    assert [*tmp_path.iterdir()] == []


def test_plugin_is_imported_without_prometheus() -> None:
    """Engines set `PROMETHEUS_MULTIPROC_DIR` before they import it, and after they load the plugin."""
    code = "import sys, logitship.server.sglang.hooks, logitship.server.vllm.front_end_hooks; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "prometheus_client" not in found.stdout.split()


def test_time_of_further_tenants_is_added_up() -> None:
    allowances = Allowances(0.2)
    for number in range(MAX_TENANTS + 2):
        allowances.patience.charge(f"t{number}", 1.0)
    assert len(allowances.tenant_seconds) == MAX_TENANTS + 1
    assert allowances.tenant_seconds["other"] == 2.0


def test_first_process_makes_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = f"""
import os
from logitship.server.runtime.shared_directory import make_shared_directory
make_shared_directory()
print(os.path.isdir(os.environ["{SHARED_DIRECTORY}"]))
"""
    environment: Any = {name: value for name, value in os.environ.items() if name != SHARED_DIRECTORY}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout == "True\n"
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setenv(SHARED_DIRECTORY, "of another process")
    make_shared_directory()
    assert os.environ[SHARED_DIRECTORY] == "of another process"
