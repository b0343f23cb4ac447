"""Targets on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from logitship.server.check.check_options import UsageError
from logitship.server.check.class_import import import_class

ONE = """
from logitship import CustomLogitProcessor

class Only(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
"""
TWO = f"""{ONE}
class Base(CustomLogitProcessor):
    pass

class Other(Only):
    class Inner(Only):
        pass

only = Only()
number = 3
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the author's files in the current folder."""
    (tmp_path / "alone_for_check.py").write_text(ONE)
    (tmp_path / "two_for_check.py").write_text(TWO)
    folder = tmp_path / "package_for_check"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "deep.py").write_text("from package_for_check.helper import X\n" + ONE)
    (folder / "helper.py").write_text("X = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("alone_for_check:Only", "Only"),
        ("alone_for_check", "Only"),
        ("alone_for_check.py", "Only"),
        ("alone_for_check.py:Only", "Only"),
        ("./two_for_check.py:Other", "Other"),
        ("two_for_check:Other.Inner", "Other.Inner"),
        ("package_for_check.deep:Only", "Only"),
        ("package_for_check/deep.py:Only", "Only"),
    ],
)
def test_import_class(target: str, name: str) -> None:
    assert import_class(target).__qualname__ == name


def test_file_in_another_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "neighbour_for_check.py").write_text("Y = 2\n")
    (project / "uses_for_check.py").write_text("from neighbour_for_check import Y\n" + ONE)
    monkeypatch.chdir("/")
    assert import_class(f"{project}/uses_for_check.py").__name__ == "Only"


def test_file_does_not_replace_loaded_module(project: Path) -> None:
    (project / "random.py").write_text(ONE)
    before = sys.modules["random"]
    cls = import_class("./random.py")
    assert sys.modules["random"] is before
    assert sys.modules[cls.__module__].__file__ == str(project / "random.py")
    assert cls.to_str()


def test_file_is_imported_once(project: Path) -> None:
    assert import_class("alone_for_check.py") is import_class("alone_for_check:Only")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:X", "there is no file 'nowhere.py'"),
        ("nowhere_at_all:X", "cannot import nowhere_at_all: ModuleNotFoundError"),
        ("not a module:X", "neither a module name nor a .py file"),
        ("two_for_check", "defines 2 processors (Only, Other): use two_for_check:Class"),
        ("two_for_check:Onyl", "has no 'Onyl'; did you mean Only?"),
        ("two_for_check:Zebra", "its processors are: Only, Other"),
        ("two_for_check:only", "is an instance: name its class, Only"),
        ("two_for_check:number", "is not a class but an object of type int"),
        ("pathlib:Path", "is not a subclass of logitship.CustomLogitProcessor"),
        ("logitship.builtin_processors.parameter_processors:MinPLogitsProcessor", "is a batch processor"),
        (":X", "neither a module name"),
    ],
)
def test_usage_errors(target: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        import_class(target)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import torch\n1 / 0\n",
            "ZeroDivisionError: division by zero (",
        ),
        ("x = (\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_import_errors_of_file(text: str, message: str, project: Path) -> None:
    (project / "broken_for_check.py").write_text(text)
    with pytest.raises(UsageError) as refused:
        import_class("broken_for_check.py")
    assert message in str(refused.value)
    assert "broken_for_check.py" in str(refused.value)
    assert "broken_for_check" not in sys.modules
