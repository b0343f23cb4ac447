"""The cookbook's classes pass `logitship check`."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitship import CustomLogitProcessor, RowProcessor
from logitship.server.check import local_timing
from logitship.server.check.check_options import CheckOptions
from logitship.server.check.environment import CheckEnvironment
from logitship.server.check.run import check_in_environment, max_batch_size
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel

COOKBOOK = Path(__file__).parents[1] / "docs" / "cookbook.md"
PARAMS: dict[str, list[dict[str, Any]]] = {
    "KeepOut": [{"scripts": ["LATIN SMALL"]}, {"scripts": ["DIGIT", "GREEK"]}],
    "OneOf": [{"labels": ["yes", "no"]}, {"labels": ["perhaps", "never", "nevermore"]}],
    "BannedWords": [{"words": ["a", "sea"]}, {"words": ["Tea"]}],
    "Length": [{"at_least": 2, "about": 4}, {"at_least": 0, "about": 1}],
    "Interject": [{"after": 1, "say": "so"}, {"after": 3, "say": "but then"}],
    "Quote": [{"text": "To be, or not to be"}, {"text": "banana"}],
    "DRY": [{"allowed_length": 1}, {"multiplier": 5.0, "window": 8}],
    "XTC": [{"seed": 1, "threshold": 0.01}, {"seed": 2, "probability": 1.0, "threshold": 0.001}],
    "TopNSigma": [{"n": 1.0}, {"n": 0.5}],
    "Watermark": [{"key": 1}, {"key": 2, "bonus": 4.0}],
}
OPTIONS: dict[str, Any] = {"batch_sizes": (1,), "ignore": frozenset({"speed"})}
BASES = (CustomLogitProcessor, RowProcessor)


def classes_of_the_cookbook(folder: Path) -> dict[str, type[CustomLogitProcessor]]:
    """Run the definitions of the page as a file: a class is serialized with its source."""
    blocks = re.findall(r"^```python\n(.*?)^```$", COOKBOOK.read_text(), re.MULTILINE | re.DOTALL)
    parts = [
        ast.get_source_segment(block, statement) or ""
        for block in blocks
        for statement in ast.parse(block).body
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    ]
    script = folder / "cookbook.py"
    script.write_text("\n\n\n".join(parts) + "\n")
    names = runpy.run_path(str(script))
    return {
        name: value
        for name, value in names.items()
        if isinstance(value, type) and issubclass(value, CustomLogitProcessor) and value not in BASES
    }


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, type[CustomLogitProcessor]]:
    return classes_of_the_cookbook(tmp_path_factory.mktemp("cookbook"))


@pytest.fixture(scope="module")
def environment(unserved_model: LoadedModel) -> Iterator[CheckEnvironment]:
    environment = CheckEnvironment(
        ServerConfig(model_path="tiny"), unserved_model, max_batch_size(CheckOptions(**OPTIONS))
    )
    yield environment
    environment.close()


def test_cookbook_has_ten_classes(classes: dict[str, type[CustomLogitProcessor]]) -> None:
    assert list(classes) == list(PARAMS)
    assert len(classes) == 10


@pytest.mark.parametrize("name", PARAMS)
def test_cookbook_class_passes_check(
    name: str,
    classes: dict[str, type[CustomLogitProcessor]],
    environment: CheckEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_timing, "SECONDS", 0.02)
    report = check_in_environment(environment, classes[name], CheckOptions(params=PARAMS[name], **OPTIONS))
    assert report.ok, str(report)
    assert report["rows"].verdict.name == "PASSED", str(report)
