"""The import arrows: client ← sampler ← builtin_processors ← server, across folders absolute, inside one relative."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "sampler", "builtin_processors", "server")
"""Each may import those to its left."""
SERVING = {"fastapi", "starlette", "uvicorn", "transformers", "vllm"}
FORBIDDEN = {
    "client": SERVING,
    "sampler": SERVING | {"httpx"},
    "builtin_processors": SERVING | {"httpx"},
    "server": {"vllm"},
}
"""Distributions that a folder never imports, not even inside a function."""
SHOWN = ROOT / "server" / "playground" / "examples"
"""Sources that the playground shows and ships, as an author would write them: no module imports them."""
VLLM_PLUGIN = ROOT / "server" / "vllm"
"""The one place that is only ever imported inside vLLM."""


@dataclass(frozen=True)
class Import:
    """One import: `level` dots, then `module`."""

    file: Path
    line: int
    level: int
    module: str

    @property
    def top(self) -> str:
        """The first part of the name."""
        return self.module.split(".")[0]


def imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, 0, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield Import(path, node.lineno, node.level, node.module or "")


def files_of(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if path.parent != SHOWN)


def imports_in(folder: str) -> list[Import]:
    return [each for path in files_of(folder) for each in imports_of(path)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    ours = [each for each in imports_in(folder) if each.level == 0 and each.top == "logitship"]
    assert [each for each in ours if each.module.split(".")[1:2] not in [[name] for name in allowed]] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_neighbours_are_imported_relatively_and_nothing_else_is(folder: str) -> None:
    def package(each: Import) -> str:
        return ".".join(("logitship", *each.file.relative_to(ROOT).parts[:-1]))

    parents = [each for each in imports_in(folder) if each.level > 1]
    neighbours = [each for each in imports_in(folder) if each.level == 0 and each.module.startswith(package(each))]
    assert parents == []
    assert [each for each in neighbours if each.module.count(".") == package(each).count(".") + 1] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_foreign_packages_stay_where_they_belong(folder: str) -> None:
    foreign = [each for each in imports_in(folder) if each.level == 0 and each.top in FORBIDDEN[folder]]
    assert [each for each in foreign if (each.file.parent, each.top) != (VLLM_PLUGIN, "vllm")] == []


def test_every_folder_is_looked_at() -> None:
    for folder in FOLDERS:
        assert len(files_of(folder)) > 1
        assert (ROOT / "src" / "logitship" / folder).resolve() == ROOT / folder


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    everything = [each for folder in (*FOLDERS, "src/logitship") for each in imports_in(folder)]
    assert [each for each in everything if each.level == 0 and each.top in FOLDERS] == []
