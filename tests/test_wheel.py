"""The four top-level folders of the repository, as `pip install` installs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "sampler", "builtin_processors", "server")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc")
BESIDE = ("logitship_sglang.py", "logitship_vllm.py")
"""Modules beside the package, which engines load."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the files that the build reads, symbolic links included: a build must not change the repository."""
    tree = tmp_path_factory.mktemp("repository")
    for name in (".gitignore", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    for name in (*FOLDERS, "src"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=NOT_SHIPPED)
    return tree


def build(tree: Path, out: Path, *options: str) -> Path:
    """Build into `out`; return the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(tree)]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree."""
    return build(tree, tmp_path_factory.mktemp("wheel"), "--wheel")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names)), "a file is in the wheel twice"
        return {name: archive.read(name) for name in names}


def package_files(tree: Path) -> dict[str, bytes]:
    """Path in the wheel -> content, of the import root, the four folders, and the modules for engines beside them."""
    files = {f"logitship/{path.name}": path for path in (tree / "src" / "logitship").iterdir() if path.is_file()}
    files |= {name: tree / "src" / name for name in BESIDE}
    for folder in FOLDERS:
        for path in (tree / folder).rglob("*"):
            if path.is_file():
                files[f"logitship/{path.relative_to(tree).as_posix()}"] = path
    return {name: path.read_bytes() for name, path in files.items()}


def test_links_are_the_four_folders() -> None:
    entries = (ROOT / "src" / "logitship").iterdir()
    links = {entry.name: entry.readlink().as_posix() for entry in entries if entry.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in FOLDERS}


def test_wheel_contains_exactly_the_tree(tree: Path, wheel: Path) -> None:
    files = contents(wheel)
    package = {name: content for name, content in files.items() if ".dist-info/" not in name}
    assert package == package_files(tree)
    assert "logitship/py.typed" in package
    assert {f"logitship/{folder}/__init__.py" for folder in FOLDERS} <= set(package)


def test_wheel_has_no_common_top_level_name(wheel: Path) -> None:
    names = {name.split("/")[0].split("-")[0] for name in contents(wheel)}
    assert names == {"logitship", *BESIDE}


def test_plain_install_requires_only_what_the_client_needs(wheel: Path) -> None:
    (metadata,) = (content for name, content in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    requirements = message_from_bytes(metadata).get_all("Requires-Dist") or []
    always = sorted(requirement.split(">")[0] for requirement in requirements if "extra ==" not in requirement)
    assert always == ["dill", "httpx", "orjson"]


def test_wheel_of_the_sdist_is_the_same(tree: Path, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    from_sdist = build(tree, out)  # the sdist, and the wheel from it
    assert contents(from_sdist) == contents(wheel)

    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert len(names) == len(set(names)), "a file is in the sdist twice"
