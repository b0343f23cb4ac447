"""Fixtures of tests that run on fakes of several engines."""

from __future__ import annotations

import pytest

from tests.helpers.engine_requests import BuildEngine
from tests.server.sglang.conftest import schedule_batch as schedule_batch

from .fake_engines import Own


@pytest.fixture(autouse=True)
def build_own_engine(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let logitship's own engine run on the tiny model."""
    monkeypatch.setattr(Own, "build", staticmethod(make_engine), raising=False)
