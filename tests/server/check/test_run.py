"""Whole checks, and the report they give."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.builtin_processors.registry import BUILTIN_PROCESSORS
from logitship.builtin_processors.tree import TreeLogitsProcessor
from logitship.builtin_processors.watermark_kgw import WatermarkKgwLogitsProcessor
from logitship.builtin_processors.watermark_synthid import WatermarkSynthidLogitsProcessor
from logitship.client.check_report import Severity, Verdict
from logitship.server.check.check_options import CHECKS, CheckOptions, UsageError
from logitship.server.check.run import run_check
from logitship.server.config import ServerConfig
from logitship.server.model.model_loader import LoadedModel
from tests.server.check.conftest import Check

MADE_BY_THE_SERVER = (
    GrammarProcessor,
    TreeLogitsProcessor,
    WatermarkKgwLogitsProcessor,
    WatermarkSynthidLogitsProcessor,
)
"""These need objects that a server makes, and are only requested by name."""


def test_correct_class_passes(check: Check, good: type[CustomLogitProcessor]) -> None:
    report = check(good, {"token_ids": [30, 31]})
    assert report.ok
    assert [each.name for each in report.checks] == list(CHECKS)
    assert {each.name: each.verdict for each in report.checks if each.verdict is not Verdict.PASSED} == {
        "argmax": Verdict.NOT_CHECKED
    }
    assert report.findings == []
    assert report.name == "Ban"
    assert report.digest.startswith("sha256:")
    assert (report.model, report.vocab_size, report.isolation) == ("tiny", 260, "sandbox")
    assert [timing.rows for timing in report.timings] == [1, 8]


class Prints(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for params in custom_param_list:
            print("output:", len(params["__req__"].output_ids))
        return logits


def test_prints_are_shown(check: Check) -> None:
    report = check(Prints, max_tokens=4, batch_sizes=(1,))
    assert report.printed == "output: 0\noutput: 1\noutput: 2\noutput: 3\n"
    assert "\n\nprinted for a prompt:\n    output: 0\n    output: 1\n" in str(report)
    assert report.to_dict()["printed"] == report.printed


@pytest.mark.thorough
def test_second_params_are_derived(check: Check, good: type[CustomLogitProcessor]) -> None:
    report = check(good, {"token_ids": [30]})
    assert (report.params, report.num_given_params) == ([{"token_ids": [30]}, {"token_ids": [31]}], 1)
    assert check(good, {"token_ids": [259]}).params == [{"token_ids": [259]}, {"token_ids": [258]}]  # 260 is no token
    report = check(good, {"token_ids": [3]}, {"token_ids": [7]})
    assert (report.params, report.num_given_params) == ([{"token_ids": [3]}, {"token_ids": [7]}], 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cls", [cls for cls in BUILTIN_PROCESSORS if cls not in MADE_BY_THE_SERVER], ids=lambda cls: cls.name
)
def test_builtin_processors_pass(cls: type[BuiltinProcessor], check: Check) -> None:
    report = check(cls, dict(cls.example), max_tokens=4, batch_sizes=(1,))
    assert [finding for finding in report.findings if finding.severity is Severity.ERROR] == []
    assert report["rows"].verdict is Verdict.PASSED


class NeedsOne(CustomLogitProcessor):
    params_schema: ClassVar[dict[str, Any]] = {
        "properties": {"token_id": {"type": "integer"}},
        "required": ["token_id"],
    }

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits


def test_required_parameter_without_example(check: Check) -> None:
    with pytest.raises(UsageError, match=r"'token_id' is required .* give params"):
        check(NeedsOne)


def test_ignored_checks_do_not_fail_report(check: Check) -> None:
    class Random(CustomLogitProcessor):
        def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
            return logits + torch.rand(1)

    assert not check(Random).ok
    report = check(Random, ignore=frozenset({"deterministic"}))
    assert report.ok
    assert report["deterministic"].verdict is Verdict.FAILED


class FailsForTheLast(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        if any(params["number"] == 8 for params in custom_param_list or []):
            raise ZeroDivisionError("eight")
        return logits


def test_all_params_are_checked(loaded_model: LoadedModel) -> None:
    params = [{"number": number} for number in range(9)]
    config = ServerConfig(model_path="tiny", processor_isolation="none")
    options = CheckOptions(params=params, max_tokens=2, batch_sizes=[1])
    report = run_check(FailsForTheLast, options, config, loaded=loaded_model)
    (finding,) = report["contract"].findings
    assert finding.details["params"] == {"number": 8}
    options = CheckOptions(params=params[:8], max_tokens=2, batch_sizes=[1])
    assert run_check(FailsForTheLast, options, config, loaded=loaded_model).ok


def test_isolation_none(loaded_model: LoadedModel, good: type[CustomLogitProcessor]) -> None:
    config = ServerConfig(model_path="tiny", processor_isolation="none")
    options = CheckOptions(params=[{"token_ids": [30]}], max_tokens=2, batch_sizes=[1])
    report = run_check(good, options, config, target="here:Ban", loaded=loaded_model)
    assert report.ok
    assert (report.isolation, report.target) == ("none", "here:Ban")
