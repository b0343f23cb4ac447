"""The check `speed`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.check_report import Severity, Verdict
from logitship.server.check.checks import speed
from tests.server.check.conftest import Check

Rows = list[dict[str, Any]] | None


class Slow(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row in range(len(custom_param_list or [])):
            sum(range(300_000))
            logits[row, 3] = -torch.inf
        return logits


class ReadsEverything(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            # Forty times, so that it is slow on the fastest processor too.
            history = list(params["__req__"].output_ids) * 40
            sum(token * token for token in history)
        return logits


class NotForMany(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        if len(logits) == 8:
            os._exit(1)
        return logits


class AllAtOnce(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits[:, 3] = -torch.inf
        return logits


def warnings_of(report: CheckReport) -> list[str]:
    return [finding.seen for finding in report["speed"].findings if finding.severity is Severity.WARNING]


def test_slow_class(check: Check) -> None:
    report = check(Slow)
    assert report.ok
    assert report["speed"].verdict is Verdict.WARNED
    # A busy machine may make it look slower with a longer output as well.
    warnings = "\n".join(warnings_of(report))
    assert "µs per row: with 8 rows, it adds " in warnings
    assert "it loops over rows: test_speed.py:" in warnings
    assert report.slow_lines[0].text == "sum(range(300_000))"
    assert report.slow_lines[0].share > 0.5
    assert all(timing.own is not None and timing.own > speed.SLOW_ROW for timing in report.timings)


def test_step_time_grows_with_output(check: Check) -> None:
    report = check(ReadsEverything)
    assert any("a step takes longer as the output grows" in warning for warning in warnings_of(report))


def test_batch_that_crashes(check: Check) -> None:
    report = check(NotForMany)
    assert not report.ok
    (finding,) = report["speed"].findings
    assert finding.seen.startswith("a call with 8 rows fails: processor NotForMany ended its process")
    assert [timing.rows for timing in report.timings] == [1]


def test_fast_class_has_no_findings(check: Check) -> None:
    report = check(AllAtOnce)
    assert report["speed"].findings == ()
    timing = report.timings[-1]
    assert timing.rows == 8
    assert timing.own is not None
    assert 0 < timing.own < timing.total


@pytest.mark.parametrize("sizes", [(3,), (4, 2, 2)])
def test_batch_sizes(sizes: tuple[int, ...], check: Check) -> None:
    assert [timing.rows for timing in check(AllAtOnce, batch_sizes=sizes).timings] == sorted(set(sizes))
