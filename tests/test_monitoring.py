"""The metrics in `docs/monitoring.md` and the dashboard are those that are exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from logitship.server.http.app import create_app
from logitship.server.metrics.engine_stats import ProcessorStats
from logitship.server.runtime.plugin_metrics import PluginMetrics
from tests.helpers.engine_requests import BuildEngine

ROOT = Path(__file__).parents[1]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/logitship.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUFFIX = {"counter": "_total"}

SOURCE = """
from logitship import CustomLogitProcessor

class Bad(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return 1 / 0
"""


@pytest.fixture
def metrics(make_engine: BuildEngine) -> dict[str, Metric]:
    """All metrics by name, each with a sample: a processor ran, and one failed."""
    with TestClient(create_app(make_engine()), base_url="http://localhost") as http:
        ban = {"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [30]}}
        for body in ({"logits_processors": [ban]}, {"custom_logit_processor": {"source": SOURCE, "class_name": "Bad"}}):
            http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 4}, **body})
        text = http.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {family.name + SUFFIX.get(family.type, ""): family for family in families}


def rows_of_page() -> Iterator[list[str]]:
    for line in (ROOT / "docs/monitoring.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("`logitship_"):
            yield cells


def test_page_lists_every_metric_with_its_type_and_labels(metrics: dict[str, Metric]) -> None:
    in_page = {name.strip("`"): (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows_of_page()}
    own = {
        name: (metric.type, {label for sample in metric.samples for label in sample.labels} - {"le"})
        for name, metric in metrics.items()
        if name.startswith("logitship_") and not name.endswith("_created")
    }
    no_sample = {"logitship_sandboxes_ended_total": ("counter", {"reason"})}
    assert in_page == own | no_sample


def test_dashboard_metrics_are_exported(metrics: dict[str, Metric]) -> None:
    exported = {sample.name for metric in metrics.values() for sample in metric.samples} | set(metrics)
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"\b((?:logitship|process)_\w+)", query)}
    assert named <= exported
    assert len(named) > 25


def test_page_and_dashboard_say_what_vllm_and_sglang_have() -> None:
    families = PluginMetrics({}, 1, ProcessorStats).collect()
    shared = {family.name + SUFFIX.get(family.type, "") for family in families}
    section = (ROOT / "docs/monitoring.md").read_text().partition("## Inside vLLM and SGLang")[2].partition("\n## ")[0]
    assert {f"logitship_{name}" for name in re.findall(r"^- `(\w+)`", section, re.MULTILINE)} == shared
    for panel in PANELS:
        queries = " ".join(target["expr"] for target in panel["targets"])
        named = set(re.findall(r"\b((?:logitship|process)_\w+?)(?:_bucket|_sum|_count)?\b", queries))
        assert ("logitship serve" in panel.get("description", "")) == (not named <= shared), panel["title"]
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "instance")
    assert (
        re.findall(r"logitship_\w+", variable["definition"] + variable["query"]["query"]) == ["logitship_sandboxes"] * 2
    )


def test_documented_metrics_are_on_the_dashboard() -> None:
    queries = json.dumps(DASHBOARD)
    left_out = {
        "logitship_info",
        "logitship_accepting",
        "logitship_pool_jobs_running",
        "logitship_steps_total",
        "logitship_request_prompt_tokens",
        "logitship_request_generation_tokens",
        "logitship_prefix_cache_blocks",
        "logitship_prefix_cache_capacity_blocks",
        "logitship_processor_cache_bytes",
        "logitship_artifact_bytes",
        "logitship_processor_calls_total",
    }
    missing = {name for row in rows_of_page() if (name := row[0].strip("`")) not in queries}
    assert missing == left_out


def test_queries_group_by_existing_labels(metrics: dict[str, Metric]) -> None:
    labels = {label for metric in metrics.values() for sample in metric.samples for label in sample.labels}
    labels |= {"reason", "instance"}
    for panel in PANELS:
        for target in panel["targets"]:
            groups = [group for groups in re.findall(r"by \(([^)]*)\)", target["expr"]) for group in groups.split(", ")]
            shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert {*groups, *shown} <= labels, panel["title"]
            assert set(shown) <= {*groups, "instance"}, panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")")


def test_panels_use_the_datasource_variable_and_do_not_overlap() -> None:
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
