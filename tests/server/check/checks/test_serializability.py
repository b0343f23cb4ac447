"""The check `serializable`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.check_report import Verdict
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.server.check.check_options import CHECKS
from logitship.server.check.checks.serializability import check_serializability
from logitship.server.check.environment import CheckEnvironment
from logitship.server.check.replayed_calls import Recording
from tests.server.check.conftest import Check

StringOf = Callable[[type[CustomLogitProcessor]], PickledProcessor]
Rows = list[dict[str, Any]] | None

lock = threading.Lock()
BIAS = 2.5


class Locked(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        with lock:
            return logits


class ReadsAFile(CustomLogitProcessor):
    def __init__(self) -> None:
        with open("/etc/hostname") as file:
            self.host = file.read()

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits


class Misspelled(CustomLogitProcessor):
    params_schema: ClassVar[dict[str, Any]] = {"requird": ["a"]}

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits


def raised(logits: torch.Tensor) -> torch.Tensor:
    return logits + BIAS


class WithHelpers(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return raised(logits)


@pytest.mark.parametrize(
    ("cls", "seen"),
    [
        (Locked, "to_str() fails: global 'lock' used by Locked.__call__ is a lock"),
        (ReadsAFile, "it cannot be loaded in a sandbox: ReadsAFile raised when it was created: "),
        (Misspelled, "a server refuses the class: params_schema: 'requird' is not a keyword of JSON Schema"),
    ],
)
def test_not_serializable(cls: type[CustomLogitProcessor], seen: str, check: Check) -> None:
    report = check(cls)
    assert not report.ok
    (finding,) = report.findings
    assert finding.check == "serializable"
    assert seen in finding.seen
    assert {report[name].verdict for name in CHECKS[1:]} == {Verdict.NOT_CHECKED}


def test_included_names(check: Check) -> None:
    report = check(WithHelpers)
    assert report["serializable"].verdict is Verdict.PASSED
    assert (
        "as source; includes raised, BIAS" in report["serializable"].summary
        or "includes BIAS, raised" in report["serializable"].summary
    )


def test_class_without_source(check: Check) -> None:
    names: dict[str, Any] = {"CustomLogitProcessor": CustomLogitProcessor, "__name__": "typed_in"}
    exec("class Typed(CustomLogitProcessor):\n    def __call__(self, logits, params=None): return logits + 1", names)
    report = check(names["Typed"])
    assert report["serializable"].verdict is Verdict.WARNED
    assert "source could not be captured" in report["serializable"].findings[0].seen
    assert report.ok


@pytest.mark.parametrize(
    ("body", "seen"),
    [("return logits * 0.5", "gives different logits: "), ("return logits\nmissing", "does not load: ")],
)
def test_source_differs_from_class(
    body: str,
    seen: str,
    environment: CheckEnvironment,
    good: type[CustomLogitProcessor],
    recorded: Callable[..., list[Recording]],
    string_of: StringOf,
) -> None:
    source = (
        "from logitship import CustomLogitProcessor\n"
        f"class Ban(CustomLogitProcessor):\n  def __call__(self, logits, params=None):\n    {body}\n"
    )
    string = replace(string_of(good), source=SourceProcessor(source, "Ban"))
    checked = check_serializability(environment, string, 100, recorded(good, {"token_ids": [30]}))
    assert checked.verdict is Verdict.WARNED
    assert f"the source of the class, which other Python versions run, {seen}" in checked.findings[0].seen


def test_string_too_large(environment: CheckEnvironment, good: type[CustomLogitProcessor], string_of: StringOf) -> None:
    checked = check_serializability(environment, string_of(good), 2 << 20, [])
    assert [finding.details for finding in checked.findings] == [{"bytes": 2 << 20, "limit": 1 << 20}]
