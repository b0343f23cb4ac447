from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.runtime import plugin_processors
from logitship.server.runtime.plugin_processors import for_admission, for_execution
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.vllm.settings import VllmSettings


@pytest.mark.parametrize("make", [for_admission, partial(for_execution, max_rows=1)])
def test_unreadable_tree_starts_no_processes(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(plugin_processors, "shipped_executor", lambda *args: started.append(args))
    settings = VllmSettings(tree={"a": str(tmp_path / "missing.json")})
    with pytest.raises(ValueError, match=r"TREE: .* cannot be read"):
        make(settings, ModelView(10, frozenset({0}), None), logger=logging.getLogger())
    assert not started


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("start", BlockingIOError(11, "Resource temporarily unavailable")),
        ("executor", ZygoteError("no namespaces")),
        ("executor", RuntimeError("can't start new thread")),
    ],
)
def test_executor_that_cannot_start_leaves_no_process(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end of an engine tries again with the next request."""
    closed: list[bool] = []

    def fails(*_: object) -> Any:
        raise error

    monkeypatch.setattr(ZygoteProcess, "start", fails if name == "start" else lambda zygote: None)
    monkeypatch.setattr(ZygoteProcess, "close", lambda zygote: closed.append(True))
    monkeypatch.setattr(plugin_processors, "sandbox_executor", fails)
    settings = SglangSettings()
    with pytest.raises(ValueError, match="shipped processors cannot run in sandboxes: .*" + re.escape(str(error))):
        plugin_processors.shipped_executor(settings, ModelView(10, frozenset({0}), None), 1, logging.getLogger())
    assert closed
