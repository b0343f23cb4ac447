"""The command `logitship check`: output and exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from logitship.server import cli
from logitship.server.check import run
from logitship.server.model.model_loader import LoadedModel, ModelLoadError

FILE = """
import torch
from logitship import CustomLogitProcessor

print("imported")
WORD = "shouted"

class Good(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        print(WORD)
        logits[:, 3] = -torch.inf
        return logits

class FirstRow(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        logits[:, custom_param_list[0]["token_id"]] = -torch.inf
        return logits

class Half(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits.half()
"""
QUICK = ["--processor-isolation", "none", "--max-tokens", "2", "--batch-sizes", "1"]


@pytest.fixture(autouse=True)
def author(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded_model: LoadedModel) -> None:
    """Create an author's folder, and load the tiny model instead of any other."""
    (tmp_path / "author_for_check.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(run, "load_model", lambda config: loaded_model)


def test_text_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "author_for_check.py:Good", *QUICK]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Good  sha256:")
    assert "✓ rows " in printed.out
    assert printed.out.endswith("No errors, no warnings.\n")
    assert "imported" not in printed.out
    assert "shouted" not in printed.out
    assert "imported" in printed.err


def test_exit_status_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    params = ["--params", '{"token_id": 3}', "--params", '{"token_id": 9}']
    assert cli.main(["check", "author_for_check:FirstRow", *params, *QUICK]) == 1
    page = capsys.readouterr().out
    assert "✗ rows " in page
    assert 'params {"token_id": 3}\n   and {"token_id": 9}\n' in page
    assert page.endswith("1 error\n")


def test_strict_exit_status_of_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "author_for_check:Half", *QUICK]) == 0
    assert cli.main(["check", "author_for_check:Half", *QUICK, "--strict"]) == 1
    assert cli.main(["check", "author_for_check:Half", *QUICK, "--strict", "--ignore", "contract", "finite"]) == 0
    assert capsys.readouterr().out.count("(ignored)") == 2


def test_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "author_for_check:FirstRow", "--params", '{"token_id": 3}', *QUICK, "--json"]
    assert cli.main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["counts"]["error"] == 1
    assert report["target"] == "author_for_check:FirstRow"
    rows = next(each for each in report["checks"] if each["name"] == "rows")
    assert rows["verdict"] == "failed"
    assert rows["findings"][0]["details"]["row"] in (0, 1)


def test_ascii_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitship.server.check.command._shows_unicode", lambda: False)
    assert cli.main(["check", "author_for_check.py:Good", *QUICK]) == 0
    page = capsys.readouterr().out
    assert page.isascii()
    assert "+ rows " in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["author_for_check.py"], "use author_for_check.py:Class"),
        (["author_for_check:Good", "--params", "3"], "params: must be a JSON object"),
        (["author_for_check:Good", "--ignore", "all"], "ignore: no check is named 'all'"),
        (["author_for_check:Good", "--sandbox-step-timeout", "0"], "sandbox_step_timeout must be above 0"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("logitship check: ")
    assert message in printed.err


def test_model_load_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> LoadedModel:
        raise ModelLoadError("there is no folder './nowhere'")

    monkeypatch.setattr(run, "load_model", fail)
    assert cli.main(["check", "author_for_check:Good", "--model", "./nowhere"]) == 2
    assert capsys.readouterr().err.endswith("logitship check: there is no folder './nowhere'\n")


def test_help_lists_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "serializable, contract, finite, deterministic, state, rows, argmax, speed" in shown
    assert "--model-path" in shown
    assert "--sandbox-step-timeout" in shown
