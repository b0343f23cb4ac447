"""Fakes of the parts of SGLang that the plugin reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.shared_directory import SHARED_DIRECTORY
from logitship.server.sglang.sglang_settings import SglangSettings
from tests.server.runtime.fake_engine import EOS, VOCAB_SIZE


class FinishAbort(SimpleNamespace):
    """Fake of SGLang's `FINISH_ABORT`."""

    def __init__(self, message: str, status_code: int, err_type: str) -> None:
        super().__init__(message=message, status_code=status_code, err_type=err_type)


@pytest.fixture(autouse=True)
def schedule_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugin import `FINISH_ABORT` from SGLang."""
    module = ModuleType("sglang.srt.managers.schedule_batch")
    module.FINISH_ABORT = FinishAbort  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(autouse=True)
def shared_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the plugin have a folder for the processes of an engine."""
    path = tmp_path / "shared"
    path.mkdir()
    monkeypatch.setenv(SHARED_DIRECTORY, str(path))
    return path


@pytest.fixture
def model() -> ModelView:
    return ModelView(VOCAB_SIZE, frozenset({EOS}), None)


@pytest.fixture
def settings() -> SglangSettings:
    """Settings that run shipped code in this process, because sandboxes take seconds to start."""
    return SglangSettings(processor_isolation="none")
