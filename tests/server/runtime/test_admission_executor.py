from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.server.runtime import admission_executor
from logitship.server.runtime.admission_executor import REFUSAL_TTL, AdmissionExecutor


class FakeExecutor:
    """Loads nothing; takes `seconds` of fake time, and fails if `reason` is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seconds = 2.0
        self.reason = "gave no answer within 2 s"
        self.loads = 0
        self.loaded = 0

    def load(self, string: SourceProcessor, tenant: str = "") -> LoadedProcessor:
        self.loads += 1
        self.now += self.seconds
        if self.reason:
            raise ProcessorLoadError(self.reason)
        self.loaded += 1
        return LoadedProcessor(string.digest, "X", cast(Any, self), None)

    def unload(self, processor: LoadedProcessor) -> None:
        self.loaded -= 1


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def admission(executor: FakeExecutor) -> AdmissionExecutor:
    return AdmissionExecutor(cast(ProcessorExecutor, executor), lambda: executor.now)


def string(number: int = 0) -> SourceProcessor:
    return SourceProcessor(f"class X{number}: pass", f"X{number}")


def test_slow_failure_is_refused_without_another_load(executor: FakeExecutor, admission: AdmissionExecutor) -> None:
    with pytest.raises(ProcessorLoadError, match=r"^gave no answer within 2 s$"):
        admission.load(string())
    executor.now += REFUSAL_TTL - 1
    with pytest.raises(ProcessorLoadError, match=r"2 s \(from an earlier attempt; the next one is possible in 1 s\)"):
        admission.load(string())
    assert executor.loads == 1
    with pytest.raises(ProcessorLoadError):
        admission.load(string(1))
    assert executor.loads == 2


def test_refusal_expires(executor: FakeExecutor, admission: AdmissionExecutor) -> None:
    """The machine may have been busy."""
    with pytest.raises(ProcessorLoadError):
        admission.load(string())
    executor.now += REFUSAL_TTL
    executor.reason = ""
    assert admission.load(string()).digest == string().digest
    assert executor.loaded == 0


def test_fast_failure_may_be_retried_at_once(executor: FakeExecutor, admission: AdmissionExecutor) -> None:
    """The limit of processes may have been reached."""
    executor.seconds = admission_executor.SLOW_LOAD / 2
    with pytest.raises(ProcessorLoadError):
        admission.load(string())
    executor.reason = ""
    assert admission.load(string()).digest == string().digest


def test_number_of_remembered_refusals_is_bounded(
    executor: FakeExecutor, admission: AdmissionExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_executor, "MAX_VERDICTS", 2)
    for number in (0, 1, 2):
        with pytest.raises(ProcessorLoadError):
            admission.load(string(number))
    for number, loads in zip((2, 1, 0), itertools.chain((3, 3), (4,)), strict=True):
        with pytest.raises(ProcessorLoadError):
            admission.load(string(number))
        assert executor.loads == loads
