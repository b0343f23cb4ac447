from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from logitship.sampler.sandbox.kernel import lockdown
from logitship.sampler.sandbox.kernel.readable import readable_paths


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Directories in `sys.path`."""
    folders = {name: tmp_path / name for name in ("library", "work", "work/inside", "home", "home/packages")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "package-1.0.dist-info").mkdir()  # as created by an installer
    for name in ("script", "site-packages"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    folders["above"] = tmp_path
    (tmp_path / "link").symlink_to(folders["work"])
    folders["link"] = tmp_path / "link"
    monkeypatch.chdir(folders["work"])
    monkeypatch.setenv("HOME", str(folders["home"]))
    monkeypatch.setattr(
        sys, "path", [*map(str, folders.values()), "", "relative", "/", "/tmp", "/etc", "/nowhere/here"]
    )
    return folders


def test_libraries_are_readable() -> None:
    readable = readable_paths()
    for module in (json, pytest):
        file = Path(module.__file__ or "").resolve()
        assert any(path.resolve() in file.parents for path in readable)
    assert Path(sysconfig.get_path("purelib")) in readable
    assert Path("/usr/lib") in readable


def test_paths_are_sorted_directories() -> None:
    readable = readable_paths()
    assert list(readable) == sorted(set(readable))
    assert all(path.is_absolute() and path.is_dir() for path in readable)


def test_package_directories_in_sys_path_are_readable(entries: dict[str, Path]) -> None:
    names = ("library", "work/inside", "home/packages", "site-packages")
    assert {entries[name] for name in names} <= set(readable_paths())


def test_script_directory_is_not_readable(entries: dict[str, Path]) -> None:
    assert entries["script"] not in readable_paths()


@pytest.mark.parametrize("name", ["work", "link", "home", "above"])
def test_working_and_home_directories_are_not_readable(entries: dict[str, Path], name: str) -> None:
    assert entries[name] not in readable_paths()


@pytest.mark.parametrize("path", ["/", "/etc", "/tmp", "/root", "/home", "/proc", "/dev", "/nowhere/here"])
def test_top_level_directories_are_not_readable(entries: dict[str, Path], path: str) -> None:
    assert entries["library"] in readable_paths()
    assert Path(path) not in readable_paths()


def test_user_without_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    assert Path("/usr/lib") in readable_paths()


def test_lockdown_reexports_readable_paths() -> None:
    assert lockdown.readable_paths is readable_paths
