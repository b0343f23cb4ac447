"""What is kept where it does not survive, or where others find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.check_report import Severity, Verdict

Check = Callable[..., CheckReport]
Rows = list[dict[str, Any]] | None

total = 0


class OnSelf(CustomLogitProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        self.calls += 1
        logits[:, self.calls] = -torch.inf
        return logits


class OnTheClass(CustomLogitProcessor):
    seen: ClassVar[list[int]] = []

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            self.seen.extend(params["__req__"].output_ids[-1:])
        logits[:, self.seen] = -torch.inf
        return logits


class InAGlobal(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        global total
        total += 1
        logits[:, total % 200] = -torch.inf
        return logits


class ByRequestId(CustomLogitProcessor):
    """Right as long as no sequence forks: then two count on one counter."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            rid = params["__req__"].rid
            self.calls[rid] = self.calls.get(rid, 0) + 1
            logits[row, self.calls[rid]] = -torch.inf
        return logits


class InState(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            state = params["__req__"].state
            state["calls"] = state.get("calls", 0) + 1
            logits[row, state["calls"]] = -torch.inf
        return logits


class InParams(CustomLogitProcessor):
    """As SGLang's authors do it."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            params["calls"] = params.get("calls", 0) + 1
            logits[row, params["calls"]] = -torch.inf
        return logits


class Table(CustomLogitProcessor):
    """What it keeps on itself depends on the model alone."""

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(0, logits.shape[1], 3)
        logits[:, self.table] = -torch.inf
        return logits


class TensorInState(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            params["__req__"].state["seen"] = torch.zeros(4)
        return logits


class GeneratorInState(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for params in custom_param_list or []:
            params["__req__"].state.setdefault("numbers", (number for number in range(9)))
        return logits


@pytest.mark.parametrize(
    ("cls", "where"),
    [(OnSelf, "self.calls"), (OnTheClass, "OnTheClass.seen"), (InAGlobal, "the global total")],
)
def test_sequences_that_share_what_they_count(cls: type[CustomLogitProcessor], where: str, check: Check) -> None:
    report = check(cls)
    (finding,) = report["state"].findings
    assert finding.severity is Severity.ERROR
    assert "other sequences" in finding.seen
    assert f"From call to call, this changes: {where}" in finding.seen
    assert "__req__'].state" in finding.advice
    assert report["deterministic"].verdict is Verdict.PASSED
    assert report["rows"].verdict is Verdict.NOT_CHECKED


def test_a_fork_that_shares_what_it_counts(check: Check) -> None:
    report = check(ByRequestId)
    (finding,) = report["state"].findings
    assert finding.seen.startswith("forked, as for n > 1 and beam search: ")


def test_what_cannot_be_copied_for_a_fork(check: Check) -> None:
    (finding,) = check(GeneratorInState)["state"].findings
    assert finding.details["fault"] == "uncopyable"
    assert "cannot be copied" in finding.seen


@pytest.mark.parametrize("cls", [InState, InParams, Table])
def test_state_where_it_belongs(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls)
    assert report["state"].verdict is Verdict.PASSED, report
    assert report["state"].findings == ()
    assert report["rows"].verdict is Verdict.PASSED


def test_state_that_is_not_plain_is_a_note(check: Check) -> None:
    report = check(TensorInState)
    assert report["state"].verdict is Verdict.PASSED
    assert [finding.severity for finding in report["state"].findings] == [Severity.NOTE]
