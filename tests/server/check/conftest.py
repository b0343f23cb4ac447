"""Checks on the tiny model, in real sandboxes: one zygote per test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check import local_timing
from logitship.server.check.cases import make_cases
from logitship.server.check.check_options import CheckOptions
from logitship.server.check.checks import speed
from logitship.server.check.checks.serializability import serialized
from logitship.server.check.environment import CheckEnvironment
from logitship.server.check.replayed_calls import Recording, record
from logitship.server.check.run import check_in_environment, max_batch_size
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel

Check = Callable[..., CheckReport]
"""From a class, parameters of the rows, and keywords of `CheckOptions`, to a report."""
Record = Callable[..., list[Recording]]
"""From a class and parameters of the rows, to the recordings of all test cases with at least one step."""

OPTIONS: dict[str, Any] = {"max_tokens": 6, "batch_sizes": (1, 8)}


@pytest.fixture(scope="session")
def loaded_model(unserved_model: LoadedModel) -> LoadedModel:
    return unserved_model


@pytest.fixture(scope="module")
def environment(loaded_model: LoadedModel) -> Iterator[CheckEnvironment]:
    """An environment for calls of up to 8 rows of 260 logits."""
    environment = CheckEnvironment(
        ServerConfig(model_path="tiny", sandbox_first_step_timeout=1.0),
        loaded_model,
        max_batch_size(CheckOptions(**OPTIONS)),
    )
    yield environment
    environment.close()


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_timing, "SECONDS", 0.02)


@pytest.fixture(autouse=True)
def _patient_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the median call may take many times as long as usual. A fast class stays fast."""
    monkeypatch.setattr(speed, "SLOW_ROW", 1000.0)
    monkeypatch.setattr(speed, "COSTLY_LOOP", 1000.0)
    monkeypatch.setattr(speed, "COSTLY_HISTORY", 1000.0)


@pytest.fixture
def check(environment: CheckEnvironment) -> Check:
    def run(cls: type[CustomLogitProcessor], *params: Mapping[str, Any], **options: Any) -> CheckReport:
        return check_in_environment(environment, cls, CheckOptions(params=params, **{**OPTIONS, **options}))

    return run


@pytest.fixture
def recorded(environment: CheckEnvironment) -> Record:
    def run(cls: type[CustomLogitProcessor], *params: Mapping[str, Any]) -> list[Recording]:
        string, _ = serialized(cls)
        recordings = []
        for case in make_cases(environment.loaded, CheckOptions().prompts, params or [{}]):
            with environment.fresh_processor(string) as processor:
                recordings.append(record(processor, case, 6, environment.model.eos_token_ids))
        return [recording for recording in recordings if recording.steps]

    return run


@pytest.fixture
def string_of() -> Callable[[type[CustomLogitProcessor]], PickledProcessor]:
    return lambda cls: serialized(cls)[0]


class Ban(CustomLogitProcessor):
    """A processor without mistakes."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, params["token_ids"]] = -torch.inf
        return logits


@pytest.fixture
def good() -> type[CustomLogitProcessor]:
    return Ban
