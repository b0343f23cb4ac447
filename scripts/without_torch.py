"""Plugin for pytest that selects the tests of the fast tier that need no torch.

`scripts/test_pythons` uses it with `--noconftest`, because `tests/conftest.py` makes a model. So tests that use the
fixtures of a conftest are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.helpers.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.helpers.random_cases import register_profiles

TESTS = Path(__file__).parents[1] / "tests"
NEEDS_TORCH = re.compile("No module named '(torch|transformers|tokenizers)")
USE_TORCH_LATER = frozenset(
    {
        "test_command_of_the_image",
        "test_command_of_the_unit",
        "test_model_view_with_several_end_tokens",
        "test_server_names_are_imported_on_first_use",
    }
)
"""Tests that import it, or what needs it, when they run."""


def _constant(name: str) -> Any:
    """Return a constant of `tests/conftest.py`, which cannot be imported without torch."""
    for node in ast.parse((TESTS / "conftest.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AttributeError(f"tests/conftest.py has no {name}")


LEFT_OUT = [TESTS / path for path in _constant("THOROUGH") + _constant("SLOW")]


def pytest_configure() -> None:
    """Load the profile of `scripts/test`."""
    register_profiles()
    settings.load_profile("default")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in LEFT_OUT else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leave out the files that import torch."""
    report = yield
    if isinstance(collector, pytest.Module) and report.failed and NEEDS_TORCH.search(report.longreprtext):
        report.outcome, report.longrepr, report.result = "passed", None, []
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if isinstance(item, pytest.Function) and _is_selected(item)]


def _is_selected(item: pytest.Function) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    fixtures = {"request", *item._fixtureinfo.name2fixturedefs}
    return (
        marks.isdisjoint({"slow", "thorough"})
        and item.originalname not in USE_TORCH_LATER
        and fixtures.issuperset(item.fixturenames)
    )
