"""Strings of every supported Python version, under the version that runs the tests. Needs no torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PYTHON, PickledProcessor, parse

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "other_python_strings.json").read_text())
STRINGS = [(version, name) for version, recorded in RECORDED.items() for name in recorded["ours"]]
FIRST_PYTHON = {"TypeParameters": (3, 12), "TypeDefaults": (3, 13)}
"""Classes that older versions cannot parse."""


class Numbers(list[float]):
    """A row of logits."""

    def __iadd__(self, other: float) -> Numbers:  # type: ignore[override, misc]
        self[:] = [each + other for each in self]
        return self


def test_all_supported_versions_are_recorded() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    supported = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", project))
    assert PYTHON in supported
    assert {version for version, _ in STRINGS} == supported


@pytest.mark.parametrize(("version", "name"), STRINGS)
def test_string_of_any_version_runs(version: str, name: str) -> None:
    string = parse(RECORDED[version]["ours"][name])
    assert isinstance(string, PickledProcessor)
    assert string.python == version
    assert string.source is not None
    for form in (string, string.source):
        if sys.version_info[:2] < FIRST_PYTHON.get(name, (3, 11)):
            with pytest.raises(ProcessorLoadError, match=rf"not valid Python {PYTHON}: line \d+") as raised:
                load_class(form)
            assert form is not string or f"Python {version} serialized it" in str(raised.value)
            continue
        rows = [Numbers([0.0, 1.0]), Numbers([2.0, 3.0])]
        result = instantiate(load_class(form))(rows, [{"amount": 3.0}, {"amount": 3.0}])  # type: ignore[arg-type]
        assert result == [[6.0, 7.0], [8.0, 9.0]]


@pytest.mark.parametrize("version", [version for version in RECORDED if version != PYTHON])
def test_foreign_bytecode_without_source_is_refused(version: str) -> None:
    for name in ("ForceToken", "Looping"):
        string = parse(RECORDED[version]["bare"][name])
        assert isinstance(string, PickledProcessor)
        with pytest.raises(ProcessorLoadError) as raised:
            load_class(string)
        message = str(raised.value)
        assert "Python 3.10 or older" in message if version == "3.10" else "another Python version" in message
        assert f"this server runs Python {PYTHON}" in message
