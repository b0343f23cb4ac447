"""Distinction between the author's code and installed code."""

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
def test_other_modules_are_the_authors(name: str | None) -> None:
    assert not is_installed(name)


def module_at(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)


def test_file_shadowing_stdlib_is_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("sched")
    module_at(tmp_path / "sched.py", "sched", monkeypatch)
    assert not is_installed("sched")


def test_dist_info_marks_install_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_at(tmp_path / "own" / "thing.py", "thing", monkeypatch)
    assert not is_installed("thing")
    target = tmp_path / "target"
    (target / "thing-1.0.dist-info").mkdir(parents=True)
    module_at(target / "thing.py", "thing", monkeypatch)
    assert is_installed("thing")
