"""`CustomLogitProcessor.check()`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.server.check import run
from logitship.server.model.model_loader import LoadedModel

QUICK: dict[str, Any] = {"max_tokens": 2, "batch_sizes": [1], "processor_isolation": "none", "model_path": "tiny"}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, loaded_model: LoadedModel) -> None:
    monkeypatch.setattr(run, "load_model", lambda config: loaded_model)


def test_repr_is_text_report(good: type[CustomLogitProcessor]) -> None:
    report = good.check({"token_ids": [3]}, **QUICK)
    assert report.ok
    assert repr(report) == str(report)
    assert repr(report).startswith("Ban  sha256:")
    assert report.params == [{"token_ids": [3]}, {"token_ids": [4]}]


def test_lists_of_params_and_prompts(good: type[CustomLogitProcessor]) -> None:
    params = [{"token_ids": [3]}, {"token_ids": [5, 6]}]
    assert good.check(params, prompt=["One", "Two"], **QUICK).params == params
    assert good.check(params, prompt="One", **QUICK).ok


def test_ignored_checks() -> None:
    class Half(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
            return logits.half()

    assert {finding.check for finding in Half.check(**QUICK).findings} == {"contract"}
    assert Half.check(ignore=["contract"], **QUICK).findings == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be from 2 to 256"),
        ({"ignore": ["all"]}, ValueError, "no check is named 'all'"),
        ({"sandbox_memory": 0}, ValueError, "sandbox_memory must be 1 or greater"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_invalid_arguments(
    options: dict[str, Any], error: type[Exception], message: str, good: type[CustomLogitProcessor]
) -> None:
    with pytest.raises(error, match=message):
        good.check({"token_ids": [3]}, **{**QUICK, **options})


def test_import_error_without_server() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from logitship import CustomLogitProcessor\n"
        "class P(CustomLogitProcessor):\n"
        "    def __call__(self, logits, params=None): return logits\n"
        "P.check()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'ImportError: check() needs the server: pip install "logitship[serve]" (' in result.stderr
