from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.server.plugins import plugin_processors
from logitship.server.plugins.plugin_processors import for_admission, for_execution
from logitship.server.vllm.settings import VllmSettings


@pytest.mark.parametrize("make", [for_admission, partial(for_execution, max_rows=1)])
def test_unreadable_tree_starts_no_processes(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(plugin_processors, "shipped_executor", lambda *args: started.append(args))
    settings = VllmSettings(tree={"a": str(tmp_path / "missing.json")})
    with pytest.raises(ValueError, match=r"TREE: .* cannot be read"):
        make(settings, ModelView(10, frozenset({0}), None), logger=logging.getLogger())
    assert not started
