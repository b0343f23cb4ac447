from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import LoadedProcessor, ProcessorExecutor
from logitship.server.vllm import admission_executor
from logitship.server.vllm.admission_executor import REMEMBERED, AdmissionExecutor


class FakeExecutor:
    """Loads nothing; takes as long as it is told, and fails if it is told a reason."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes = 2.0
        self.reason = "gave no answer within 2 s"
        self.loads = 0
        self.loaded = 0

    def load(self, string: SourceProcessor, tenant: str = "") -> LoadedProcessor:
        self.loads += 1
        self.now += self.takes
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
def trials(executor: FakeExecutor) -> AdmissionExecutor:
    return AdmissionExecutor(cast(ProcessorExecutor, executor), lambda: executor.now)


def string(number: int = 0) -> SourceProcessor:
    return SourceProcessor(f"class X{number}: pass", f"X{number}")


def test_a_class_that_held_everybody_up_does_it_once(executor: FakeExecutor, trials: AdmissionExecutor) -> None:
    with pytest.raises(ProcessorLoadError, match=r"^gave no answer within 2 s$"):
        trials.load(string())
    executor.now += REMEMBERED - 1
    with pytest.raises(ProcessorLoadError, match=r"gave no answer within 2 s \(as it was; it is tried again in 1 s\)"):
        trials.load(string())
    assert executor.loads == 1
    with pytest.raises(ProcessorLoadError):
        trials.load(string(1))
    assert executor.loads == 2


def test_it_is_tried_again_later(executor: FakeExecutor, trials: AdmissionExecutor) -> None:
    """The machine may have been busy."""
    with pytest.raises(ProcessorLoadError):
        trials.load(string())
    executor.now += REMEMBERED
    executor.reason = ""
    assert trials.load(string()).digest == string().digest
    assert executor.loaded == 0


def test_what_fails_at_once_may_be_tried_at_once(executor: FakeExecutor, trials: AdmissionExecutor) -> None:
    """There may have been no room for another process."""
    executor.takes = admission_executor.SLOW / 2
    with pytest.raises(ProcessorLoadError):
        trials.load(string())
    executor.reason = ""
    assert trials.load(string()).digest == string().digest


def test_the_memory_is_bounded(
    executor: FakeExecutor, trials: AdmissionExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_executor, "_MOST_REMEMBERED", 2)
    for number in (0, 1, 2):
        with pytest.raises(ProcessorLoadError):
            trials.load(string(number))
    for number, loads in zip((2, 1, 0), itertools.chain((3, 3), (4,)), strict=True):
        with pytest.raises(ProcessorLoadError):
            trials.load(string(number))
        assert executor.loads == loads
