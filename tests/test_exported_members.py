"""`__all__` is sorted and complete, and every name in it can be imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import logitship
import logitship.client
from logitship.client import errors, records


def names_of(module: object) -> list[str]:
    exported = getattr(module, "__all__", None)
    assert isinstance(exported, list)
    return exported


@pytest.mark.parametrize("module", [logitship, logitship.client])
def test_all_is_sorted_unique_and_importable(module: object) -> None:
    names = names_of(module)
    assert names == sorted(set(names))
    for name in names:
        assert getattr(module, name) is not None


def test_all_errors_and_records_are_exported() -> None:
    public = {
        name
        for module in (errors, records)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }
    assert public <= set(names_of(logitship.client))


def test_package_exports_all_of_the_client() -> None:
    assert set(names_of(logitship)) == {*names_of(logitship.client), "__version__"}


NEED_THE_SERVER = [
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LLM",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "enable_vllm_names",
]


@pytest.mark.parametrize("name", NEED_THE_SERVER)
def test_server_names_are_imported_on_first_use(name: str) -> None:
    assert callable(getattr(logitship, name))
    assert name in dir(logitship)
    assert name not in logitship.__all__  # `import *` must not load torch


def test_docstring_lists_the_server_names() -> None:
    named = re.findall(
        r"`(\w+)`", (logitship.__doc__ or "").split("`logitship.client`.")[1].split("are imported from")[0]
    )
    assert sorted(named) == NEED_THE_SERVER


def test_missing_server_error_says_how_to_install_it() -> None:
    program = "import sys; sys.modules['torch'] = None; import logitship; logitship.LLM"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'ImportError: logitship.LLM needs the server: pip install "logitship[serve]" (' in result.stderr


def test_error_tree_in_the_docstring_is_complete() -> None:
    shown = set(re.findall(r"[─│ ]*\b([A-Z]\w+(?:Error|Fault))\b", (errors.__doc__ or "").split("```")[1]))
    assert shown == {name for name, value in vars(errors).items() if isinstance(value, type)} - {"Any"}


def test_version_matches_the_distribution() -> None:
    assert logitship.__version__ == version("logitship")
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{logitship.__version__}"' in pyproject


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = logitship.nothing  # type: ignore[attr-defined]
