"""Checks on the tiny model, in real sandboxes that come from one template a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check import line_times, own_time
from logitship.server.check.bench import Bench
from logitship.server.check.check_options import CheckOptions
from logitship.server.check.checks import speed
from logitship.server.check.checks.serializability import shipped
from logitship.server.check.recording import Recording, record
from logitship.server.check.run import check_on, max_rows_of
from logitship.server.check.test_cases import make_trials
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel

Check = Callable[..., CheckReport]
"""A class, the rows' parameters, and keywords of `CheckOptions`, to a report."""
Record = Callable[..., list[Recording]]
"""A class and the rows' parameters, to recordings of all trials that have a step."""

OPTIONS: dict[str, Any] = {"max_tokens": 6, "batch_sizes": (1, 8)}


@pytest.fixture(scope="session")
def loaded_model(unserved_model: LoadedModel) -> LoadedModel:
    return unserved_model


@pytest.fixture(scope="module")
def bench(loaded_model: LoadedModel) -> Iterator[Bench]:
    """Sandboxes for calls of up to 8 rows of 260 tokens."""
    bench = Bench(ServerConfig(model_path="tiny"), loaded_model, max_rows_of(CheckOptions(**OPTIONS)))
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (line_times, own_time, speed):
        monkeypatch.setattr(module, "SECONDS", 0.02)


@pytest.fixture
def check(bench: Bench) -> Check:
    def run(cls: type[CustomLogitProcessor], *params: Mapping[str, Any], **options: Any) -> CheckReport:
        return check_on(bench, cls, CheckOptions(params=params, **{**OPTIONS, **options}))

    return run


@pytest.fixture
def recorded(bench: Bench) -> Record:
    def run(cls: type[CustomLogitProcessor], *params: Mapping[str, Any]) -> list[Recording]:
        string, _ = shipped(cls)
        recordings = []
        for trial in make_trials(bench.loaded, CheckOptions().prompts, params or [{}]):
            with bench.stage(string) as stage:
                recordings.append(record(stage, trial, 6, bench.model.eos_token_ids))
        return [recording for recording in recordings if recording.steps]

    return run


@pytest.fixture
def string_of() -> Callable[[type[CustomLogitProcessor]], PickledProcessor]:
    return lambda cls: shipped(cls)[0]


class Ban(CustomLogitProcessor):
    """Right in every way."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, params["token_ids"]] = -torch.inf
        return logits


@pytest.fixture
def good() -> type[CustomLogitProcessor]:
    return Ban
