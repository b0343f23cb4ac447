"""What the author wrote is told from what is installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from logitship.client.serialization.provenance import is_installed


@pytest.mark.parametrize("name", ["builtins", "json", "os.path", "_thread", "torch.nn.functional", "orjson", "pytest"])
def test_libraries_are_installed(name: str) -> None:
    assert is_installed(name)


@pytest.mark.parametrize("name", [None, "__main__", "__mp_main__", "logitship.client", "no_such_module", __name__])
def test_everything_else_is_the_authors(name: str | None) -> None:
    assert not is_installed(name)


def module_at(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_file_may_shadow_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("sched")
    module_at(tmp_path / "sched.py", "sched", monkeypatch)
    assert not is_installed("sched")


def test_an_installers_folder_is_known_by_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_at(tmp_path / "own" / "thing.py", "thing", monkeypatch)
    assert not is_installed("thing")
    target = tmp_path / "target"
    (target / "thing-1.0.dist-info").mkdir(parents=True)
    module_at(target / "thing.py", "thing", monkeypatch)
    assert is_installed("thing")
