"""The checks `contract`, `finite` and `argmax`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.check_report import Severity, Verdict
from logitship.server.check.check_options import CHECKS
from tests.server.check.conftest import Check

Rows = list[dict[str, Any]] | None


class Raises(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        raise ZeroDivisionError("seven")


class ReturnsNothing(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits[:, 0] = 0
        return None  # type: ignore[return-value]


class WrongShape(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits[0]


class Integers(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits.nan_to_num().int()


class Hangs(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        while True:
            pass


class Exits(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        os._exit(3)


@pytest.mark.parametrize(
    ("cls", "seen", "kind"),
    [
        (Raises, "ZeroDivisionError: seven", "exception"),
        (ReturnsNothing, "returned NoneType", "bad_result"),
        (WrongShape, "returned shape [260], expected [1, 260]", "bad_result"),
        (Integers, "dtype torch.int32", "bad_result"),
        (Hangs, "gave no answer within 1 s", "deadline"),
        (Exits, "ended its process with exit status 3", "crash"),
    ],
)
def test_contract_violations(cls: type[CustomLogitProcessor], seen: str, kind: str, check: Check) -> None:
    report = check(cls)
    assert not report.ok
    (finding,) = report.findings
    assert finding.check == "contract"
    assert seen in finding.seen
    assert finding.details["fault"] == kind
    assert finding.advice
    later = [report[name].verdict for name in CHECKS[CHECKS.index("deterministic") :]]
    assert set(later) == {Verdict.NOT_CHECKED}


def test_traceback_in_report(check: Check) -> None:
    report = check(Raises)
    (finding,) = report.findings
    frame = 'File "test_contract.py", line '
    assert frame in finding.traceback
    assert frame in str(report)


def test_advice_on_missing_params(check: Check, good: type[CustomLogitProcessor]) -> None:
    (finding,) = check(good).findings
    assert "KeyError: 'token_ids'" in finding.seen
    assert "--params" in finding.advice
    (finding,) = check(good, {"token_id": [3]}).findings
    assert "--params" not in finding.advice


class Half(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits.half()


class Double(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits.double()


@pytest.mark.parametrize(("cls", "cost"), [(Half, "float16"), (Double, "float64")])
def test_other_float_dtype_is_warning(cls: type[CustomLogitProcessor], cost: str, check: Check) -> None:
    report = check(cls)
    assert report.ok
    assert report["contract"].verdict is Verdict.WARNED
    assert [finding.details for finding in report["contract"].findings] == [{"dtype": cost}]


class Centred(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits - logits.mean(dim=-1, keepdim=True)


class PlusInfinity(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits[:, 5] = torch.inf
        return logits


class NothingLeft(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)


def test_nan_from_masked_logits(check: Check) -> None:
    """Only masked logits reveal this mistake: their mean is -inf."""
    report = check(Centred)
    (finding,) = [each for each in report.findings if each.severity is Severity.ERROR]
    assert (finding.check, finding.details["fault"]) == ("finite", "non_finite")
    assert "random logits, half of them -inf" in finding.seen
    assert "NaN" in finding.seen
    assert "0 * -inf" in finding.advice


@pytest.mark.parametrize(
    ("cls", "seen", "advice"),
    [(PlusInfinity, "returned +inf", "forbid all others"), (NothingLeft, "left no token", "at least one token")],
)
def test_rows_without_token_to_sample(cls: type[CustomLogitProcessor], seen: str, advice: str, check: Check) -> None:
    (finding,) = check(cls).findings
    assert finding.check == "finite"
    assert seen in finding.seen
    assert advice in finding.advice


class ForcesSeven(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        forced = logits[:, 7].clone()
        logits[:] = -torch.inf
        logits[:, 7] = forced
        return logits


def test_no_token_after_mask_is_no_error(check: Check) -> None:
    report = check(ForcesSeven)
    assert report.ok, report
    assert report["finite"].verdict is Verdict.PASSED


class Sharper(CustomLogitProcessor):
    def is_argmax_invariant(self) -> bool:
        return True

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits * 2


class BansSeven(CustomLogitProcessor):
    is_argmax_invariant = True

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        most_likely = logits.argmax(dim=-1)
        logits[torch.arange(len(logits)), most_likely] -= 100
        return logits


class CannotSay(BansSeven):
    def is_argmax_invariant(self) -> bool:  # type: ignore[override]
        raise ZeroDivisionError("seven")


def test_argmax_invariance_that_fails(check: Check) -> None:
    report = check(CannotSay)
    (finding,) = report["argmax"].findings
    assert (report["argmax"].verdict, report["speed"].verdict) == (Verdict.FAILED, Verdict.PASSED)
    assert finding.seen == "is_argmax_invariant raises ZeroDivisionError: seven"
    assert "in is_argmax_invariant" in finding.traceback


class Modest(BansSeven):
    is_argmax_invariant = False


def test_argmax_invariant_class(check: Check) -> None:
    assert check(Sharper)["argmax"].verdict is Verdict.PASSED


def test_false_argmax_invariance(check: Check) -> None:
    (finding,) = check(BansSeven)["argmax"].findings
    assert finding.details["before"] != finding.details["after"]
    assert (
        f"the most likely token was {finding.details['before']} and is now {finding.details['after']}" in finding.seen
    )


@pytest.mark.parametrize("cls", [Modest])
def test_argmax_invariance_not_declared(cls: type[CustomLogitProcessor], check: Check) -> None:
    assert check(cls)["argmax"].verdict is Verdict.NOT_CHECKED


class AppendsToTheHistory(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            params["__req__"].output_ids.append(3)
        return logits


class ReplacesThePrompt(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            params["__req__"].origin_input_ids = params["__req__"].origin_input_ids[-2:]
        return logits


class CopiesTheHistory(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            history = list(params["__req__"].output_ids)
            history.append(3)
        return logits


@pytest.mark.parametrize(
    ("cls", "name"), [(AppendsToTheHistory, "output_ids"), (ReplacesThePrompt, "origin_input_ids")]
)
def test_edited_history(cls: type[CustomLogitProcessor], name: str, check: Check) -> None:
    report = check(cls)
    assert not report.ok
    (finding,) = report["contract"].findings
    assert finding.seen == f"it changes __req__.{name}, which later steps then read as the request's history"
    assert finding.advice == (
        f"Read it only, or work on a copy: list(__req__.{name}). Keep your own values in __req__.state."
    )


def test_copied_history(check: Check) -> None:
    assert check(CopiesTheHistory).ok
