"""`/metrics`: formats, and values of real engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from starlette.testclient import TestClient

from logitship.builtin_processors import grammar
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http.app import create_app
from tests.helpers.engine_requests import BuildEngine

FakeEngine = Any

SOURCE = """
from logitship import CustomLogitProcessor

class {name}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {body}
"""


def shipped(name: str, body: str = "return logits") -> dict[str, Any]:
    return {"custom_logit_processor": {"source": SOURCE.format(name=name, body=body), "class_name": name}}


# --- formats ---


def test_default_format_is_text(client: Any) -> None:
    answer = client.http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "logitship_running_sequences" in {family.name for family in read_text(answer.text)}


def test_openmetrics_on_request(client: Any) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    answer = client.http.get("/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "logitship_running_sequences" in {family.name for family in read_openmetrics(answer.text)}


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain;version=x", "application/openmetrics-text;version=1.y", ";;="]
)
def test_any_accept_header(accept: str, client: Any) -> None:
    answer = client.http.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert "logitship_running_sequences" in answer.text


def test_metrics_require_a_key(
    make_fake_engine: Callable[..., FakeEngine], make_client: Callable[[FakeEngine], Any]
) -> None:
    http = make_client(make_fake_engine(api_key="key")).http
    assert http.get("/metrics").status_code == 401
    assert http.get("/metrics", headers={"Authorization": "Bearer key"}).status_code == 200


# --- figures ---


class Running:
    """An app on the real engine, and its metrics."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.http = TestClient(create_app(engine), base_url="http://localhost", raise_server_exceptions=False)

    def generate(self, max_new_tokens: int = 4, status: int = 200, **body: Any) -> Any:
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **body.pop("sampling_params", {})}
        answer = self.http.post("/generate", json={"text": "abc", "sampling_params": params, **body})
        assert answer.status_code == status, answer.text
        return answer.json()

    def read(self, name: str, **labels: str) -> float:
        found = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in read_text(self.http.get("/metrics").text)
            for sample in family.samples
        }
        return found.get((f"logitship_{name}", tuple(sorted(labels.items()))), 0.0)


@pytest.fixture
def run(make_engine: BuildEngine) -> Iterator[Callable[..., Running]]:
    """Creates apps on engines with these settings."""
    made: list[Running] = []

    def build(**settings: Any) -> Running:
        made.append(Running(make_engine(**settings)))
        return made[-1]

    yield build
    for each in made:
        each.http.close()


def test_requests_and_tokens(run: Callable[..., Running]) -> None:
    running = run()
    running.generate()
    running.generate(text=["a", "b"], sampling_params={"n": 2})
    assert running.read("requests_total") == 3
    assert running.read("prompt_tokens_total") == 5
    assert running.read("generation_tokens_total") == 20
    assert running.read("sequences_finished_total", reason="length") == 5
    assert running.read("time_to_first_token_seconds_count") == 5
    assert running.read("inter_token_latency_seconds_count") == 15
    assert running.read("request_queue_duration_seconds_count") == 3
    assert running.read("request_duration_seconds_count") == 5
    waits = [running.read(f"{name}_seconds_sum") for name in ("request_queue_duration", "time_to_first_token")]
    assert 0 < waits[0] < waits[1] < running.read("request_duration_seconds_sum")
    assert running.read("http_requests_total", method="POST", route="/generate", status="200") == 2


def test_scrape_is_no_running_job(run: Callable[..., Running]) -> None:
    running = run()
    assert "logitship_pool_jobs_running 0.0\n" in running.http.get("/metrics").text


def test_steps_are_the_sum_of_their_phases(run: Callable[..., Running]) -> None:
    running = run()
    running.generate(8, **shipped("Mine"))
    steps = running.read("steps_total")
    assert steps >= 8
    assert running.read("step_duration_seconds_count") == steps
    names = ("schedule", "batch_update", "forward", "sample", "processors", "deliver")
    sums = [running.read("step_phase_duration_seconds_sum", phase=name) for name in names]
    assert all(each > 0 for each in sums)
    assert sum(sums) == pytest.approx(running.read("step_duration_seconds_sum"))
    assert running.read("step_rows_sum") == 8


def test_processors_by_name(run: Callable[..., Running]) -> None:
    running = run()
    running.generate(5, **shipped("Mine"))
    running.generate(3, logits_processors=[{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [9]}}])
    mine = {"processor": "Mine", "origin": "shipped"}
    installed = {"processor": "disallowed_tokens", "origin": "installed"}
    for labels, steps in ((mine, 5), (installed, 3)):
        assert running.read("processor_call_duration_seconds_count", **labels) == steps
        assert running.read("processor_call_duration_seconds_sum", **labels) > 0
        assert running.read("processor_rows_total", **labels) == steps
    assert running.read("processor_cache_misses_total") == 1
    assert running.read("processor_cache_entries") == 1
    assert running.read("processor_load_duration_seconds_count") == 2


def test_faults_and_refusals(run: Callable[..., Running]) -> None:
    running = run()
    running.generate(status=400, **shipped("Bad", "return 1 / 0"))
    running.generate(status=400, **shipped("Wide", "return logits[:, 1:]"))
    running.generate(status=400, sampling_params={"top_p": 7})
    assert running.read("sequences_finished_total", reason="error") == 2
    assert running.read("sequence_errors_total", type="ProcessorFault") == 2
    assert running.read("processor_faults_total", processor="Bad", origin="shipped", kind="exception") == 1
    assert running.read("processor_faults_total", processor="Wide", origin="shipped", kind="bad_result") == 1
    assert running.read("http_requests_total", method="POST", route="/generate", status="400") == 3
    assert running.read("requests_total") == 2


def test_registered_processors(run: Callable[..., Running]) -> None:
    running = run()
    running.http.post("/v1/processors", json=shipped("Mine")["custom_logit_processor"])
    assert running.read("registered_processors") == 1


def test_drafts(run: Callable[..., Running]) -> None:
    running = run(speculative_algorithm="NGRAM", enable_custom_logit_processor=False, max_forced_run=0)
    # Two tokens in turns are what prompt lookup finds.
    for _ in range(3):
        running.generate(60, text="abababababab", sampling_params={"temperature": 0, "allowed_token_ids": [70]})
    drafted, accepted = running.read("draft_tokens_total"), running.read("accepted_draft_tokens_total")
    assert 0 < accepted <= drafted
    assert running.read("generation_tokens_total") == 180
    assert running.read("inter_token_latency_seconds_count") < 180 - accepted


def test_forced_tokens(run: Callable[..., Running]) -> None:
    running = run(max_forced_run=9)
    running.generate(41, text="ab", sampling_params={"temperature": 0, "allowed_token_ids": [70]})
    # Each step but the last one has a run of nine, the last token of the request is sampled.
    assert running.read("forced_tokens_total") == 36
    assert running.read("steps_total") == 5


def test_grammars(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = run()
    running.generate(sampling_params={"regex": "[a-z]{9}"})
    names = ("checks_running", "checks_waiting", "failures_total")
    assert [running.read(f"grammar_{name}") for name in names] == [0, 0, 0]
    monkeypatch.setattr(grammar, "_MAX_SECONDS", -1.0)
    running.generate(status=400, sampling_params={"regex": "[a-z]{8}"})
    assert running.read("grammar_failures_total") == 1


def test_beams(run: Callable[..., Running]) -> None:
    running = run()
    running.generate(sampling_params={"num_beams": 3, "n": 2})
    assert running.read("sequences_finished_total", reason="length") == 2
    assert running.read("generation_tokens_total") == 8


def test_failed_step(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = run()
    monkeypatch.setattr(running.engine._engine._sampler, "sample", lambda *_: 1 / 0)
    running.generate(status=500)
    assert running.read("sequence_errors_total", type="InternalServerError") == 1
    monkeypatch.undo()
    running.generate()
    assert running.read("generation_tokens_total") == 4


def test_dead_engine(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = run()
    monkeypatch.setattr(running.engine._engine, "step", lambda: 1 / 0)
    running.generate(status=500)
    assert running.read("sequences_finished_total", reason="error") == 1


def test_concurrent_scrapes(run: Callable[..., Running]) -> None:
    running = run()
    stop = threading.Event()
    started = threading.Barrier(3)
    answers: list[int] = []

    def scrape(app: FastAPI) -> None:
        with TestClient(app, base_url="http://localhost") as http:
            answers.append(http.get("/metrics").status_code)
            started.wait(60)
            while not stop.is_set():
                answers.append(http.get("/metrics").status_code)

    apps = [create_app(running.engine) for _ in range(2)]
    # FastAPI needs pydantic's models for the first request, and pydantic cannot build them in two threads at once.
    for app in apps:
        assert TestClient(app, base_url="http://localhost").get("/metrics").status_code == 200
    threads = [threading.Thread(target=scrape, args=(app,)) for app in apps]
    for thread in threads:
        thread.start()
    started.wait(60)
    for number in range(5):
        running.generate(6, **shipped(f"Mine{number}"))
    stop.set()
    for thread in threads:
        thread.join()
    assert set(answers) == {200}
    assert running.read("generation_tokens_total") == 30


# --- who reads what ---

NAMED = {
    "source": """
from logitship import CustomLogitProcessor

class SecretName(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        raise ValueError
""",
    "class_name": "SecretName",
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("keys", "reader", "shown"),
    [
        ({"api_key": ("mine", "other")}, "other", False),
        ({"api_key": ("mine", "other")}, "mine", False),
        ({"api_key": "mine"}, "mine", True),
        ({"api_key": ("mine", "other"), "metrics_api_key": "metrics"}, "metrics", True),
    ],
)
def test_names_of_other_tenants_classes(
    keys: dict[str, Any], reader: str, shown: bool, run: Callable[..., Running]
) -> None:
    running = run(**keys)
    body = {"text": "a", "custom_logit_processor": NAMED}
    assert running.http.post("/generate", json=body, headers=bearer("mine")).status_code == 400
    text = running.http.get("/metrics", headers=bearer(reader)).text
    name = "SecretName" if shown else "other"
    assert f'logitship_processor_rows_total{{origin="shipped",processor="{name}"}}' in text
    assert f'logitship_processor_faults_total{{kind="exception",origin="shipped",processor="{name}"}} 1.0' in text
    assert ("SecretName" in text) == shown


def test_metrics_key(make_fake_engine: Any, make_client: Any) -> None:
    http = make_client(make_fake_engine(api_key="k", metrics_api_key=("m", "n"))).http
    for key, metrics, models in (("k", 401, 200), ("m", 200, 401), ("n", 200, 401), ("", 401, 401)):
        assert http.get("/metrics", headers=bearer(key)).status_code == metrics
        assert http.get("/v1/models", headers=bearer(key)).status_code == models
    assert "metrics_api_key" not in http.get("/server_info", headers=bearer("k")).json()


def test_metrics_key_without_api_keys(make_fake_engine: Any, make_client: Any) -> None:
    http = make_client(make_fake_engine(metrics_api_key="m")).http
    assert http.get("/metrics").status_code == 401
    assert http.get("/metrics", headers=bearer("m")).status_code == 200
    assert http.get("/v1/models").status_code == 200
