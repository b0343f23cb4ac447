"""Rules for all modules: imports, names, docstrings and broad excepts.

The import-linter contracts (`scripts/check`) hold which folder may import which.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("client", "sampler", "builtin_processors", "server")
EXAMPLES = ROOT / "server" / "playground" / "examples"
"""Sources that the playground shows and ships, as an author would write them: no module imports them."""
MAX_MODULES = 20
"""In one folder; `builtin_processors` is exempt, because each of its files is one processor."""
RIDDLES = ("How", "Of", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why")
"""First words of docstrings that describe a thing without naming it."""
RIDDLE = re.compile(rf"""["'][\s\\]*(?:{"|".join(RIDDLES)})\b""")
"""Finds the files that may have one: parsing all takes long."""
BOUNDARIES = (
    *("SGLang", "author code", "engine thread", "event loop", "other engine", "process death", "third-party code"),
    "vLLM",
)
"""Places where any exception is caught. `CONTRIBUTING.md` lists them."""
STAND_INS = {
    "FinishReason": "in the client, the record of the server's class",
    "GenerationChunk": "in the client, the record of the server's class",
    "SamplingParams": "in `logitship.server.offline`, vLLM's class",
}
"""Class names that two modules may define, and why."""


@dataclass(frozen=True)
class Import:
    """One import: `level` dots, then `module`."""

    file: Path
    line: int
    level: int
    module: str


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the syntax tree of a module, flattened; its first node is the module."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def imports_of(path: Path) -> Iterator[Import]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, 0, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield Import(path, node.lineno, node.level, node.module or "")


def files_of(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if path.parent != EXAMPLES)


def imports_in(folder: str) -> list[Import]:
    return [each for path in files_of(folder) for each in imports_of(path)]


def package_of(path: Path) -> str:
    return ".".join(("logitship", *path.relative_to(ROOT).parts[:-1]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_relative_imports_only_within_a_folder(folder: str) -> None:
    imports = imports_in(folder)
    neighbours = [each for each in imports if each.module.rpartition(".")[0] == package_of(each.file)]
    modules = [each for each in neighbours if (each.file.parent / f"{each.module.rpartition('.')[2]}.py").exists()]
    assert [each for each in imports if each.level > 1] == []
    assert [each for each in modules if each.level == 0] == []


def test_folders_are_linked_into_the_package() -> None:
    for folder in FOLDERS:
        assert len(files_of(folder)) > 1
        assert (ROOT / "src" / "logitship" / folder).resolve() == ROOT / folder


def test_folders_are_not_imported_by_their_bare_names() -> None:
    everything = [each for folder in (*FOLDERS, "src/logitship") for each in imports_in(folder)]
    assert [each for each in everything if each.level == 0 and each.module.split(".")[0] in FOLDERS] == []


def test_no_folder_holds_too_many_modules() -> None:
    folders = {path.parent for folder in FOLDERS for path in files_of(folder)} - {ROOT / "builtin_processors"}
    sizes = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MAX_MODULES} == {}


def test_modules_have_different_names() -> None:
    names = [path.name for folder in FOLDERS for path in files_of(folder) if path.name != "__init__.py"]
    stand_ins = {"sampling_params.py"}  # `logitship.server.offline` has vLLM's class of that name
    assert {name for name in names if names.count(name) > 1} - stand_ins == set()


def test_classes_have_different_names() -> None:
    names = [
        statement.name
        for folder in FOLDERS
        for path in files_of(folder)
        for statement in ast.iter_child_nodes(nodes_of(path)[0])
        if isinstance(statement, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == set(STAND_INS)


def broad_excepts() -> Iterator[tuple[str, str]]:
    """Yield the place and the source line of each `except` that catches all exceptions."""
    for path in (path for folder in FOLDERS for path in files_of(folder)):
        lines = path.read_text().splitlines()
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                caught = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)} if node.type else set()
                if not node.type or caught & {"Exception", "BaseException", "BaseExceptionGroup", "ExceptionGroup"}:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", lines[node.lineno - 1]


def test_broad_excepts_name_their_boundary() -> None:
    endings = (*(f"  # boundary: {boundary}" for boundary in BOUNDARIES), "  # cleanup, then re-raised")
    found = dict(broad_excepts())
    assert len(found) > 20
    assert {place: line for place, line in found.items() if not line.endswith(endings)} == {}


def test_boundaries_are_documented() -> None:
    rules = (ROOT / "CONTRIBUTING.md").read_text()
    assert [boundary for boundary in BOUNDARIES if f"`{boundary}`" not in rules] == []


def docstrings_of(path: Path) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes and functions, and the strings that describe attributes."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "benchmarks"])
def test_docstrings_name_their_subject(folder: str) -> None:
    riddles = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value.splitlines()[0]}"
        for path in files_of(folder)
        if RIDDLE.search(path.read_text())
        for text in docstrings_of(path)
        if text.value.split()[:1] and text.value.split()[0] in RIDDLES
    ]
    assert riddles == []
