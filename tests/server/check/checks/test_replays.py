"""The checks `deterministic`, `state` and `rows`."""

from __future__ import annotations

import ast
import importlib.util
import random
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.client.check_report import Severity, Verdict
from logitship.server.check.class_import import import_class
from tests.server.check.conftest import Check

Rows = list[dict[str, Any]] | None

total = 0


class TorchRandom(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits + torch.rand(1)


class PythonRandom(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits[:, random.randrange(260)] = -torch.inf
        return logits


class Clock(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits + time.perf_counter_ns() % 1000


class Watermark(CustomLogitProcessor):
    """Random, but seeded with the history."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            seed = sum(params["__req__"].output_ids)
            logits[row] += torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(seed))
        return logits


@pytest.mark.parametrize("cls", [TorchRandom, PythonRandom, Clock])
def test_nondeterministic_classes(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls)
    assert [finding.check for finding in report.findings if finding.check != "speed"] == ["deterministic"]
    assert "torch.Generator" in report["deterministic"].findings[0].advice
    assert {report[name].verdict for name in ("state", "rows")} == {Verdict.NOT_CHECKED}


def test_seeded_random_numbers(check: Check) -> None:
    assert check(Watermark).ok


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
    """Fails only for forks: they share the counter of their request id."""

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
    """Keeps its state in the parameters, as SGLang's processors do."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            params["calls"] = params.get("calls", 0) + 1
            logits[row, params["calls"]] = -torch.inf
        return logits


class Table(CustomLogitProcessor):
    """Keeps a table on self that depends only on the model."""

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
def test_state_shared_by_sequences(cls: type[CustomLogitProcessor], where: str, check: Check) -> None:
    report = check(cls)
    (finding,) = report["state"].findings
    assert finding.severity is Severity.ERROR
    assert "other sequences" in finding.seen
    assert f"Changed from call to call: {where}" in finding.seen
    assert "__req__'].state" in finding.advice
    assert report["deterministic"].verdict is Verdict.PASSED
    assert report["rows"].verdict is Verdict.NOT_CHECKED


def test_state_shared_by_forks(check: Check) -> None:
    report = check(ByRequestId)
    (finding,) = report["state"].findings
    assert finding.seen.startswith("forked, as for n > 1 and beam search: ")


def test_state_that_cannot_be_copied(check: Check) -> None:
    (finding,) = check(GeneratorInState)["state"].findings
    assert finding.details["fault"] == "uncopyable"
    assert "cannot be copied" in finding.seen


@pytest.mark.parametrize("cls", [InState, InParams, Table])
def test_state_per_sequence(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls)
    assert report["state"].verdict is Verdict.PASSED, report
    assert report["state"].findings == ()
    assert report["rows"].verdict is Verdict.PASSED


def test_unrestorable_state_is_note(check: Check) -> None:
    report = check(TensorInState)
    assert report["state"].verdict is Verdict.PASSED
    assert [finding.severity for finding in report["state"].findings] == [Severity.NOTE]


class FirstRowsParams(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        assert custom_param_list
        logits[:, custom_param_list[0]["token_ids"]] = -torch.inf
        return logits


class EndsAtOnce(FirstRowsParams):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits = super().__call__(logits, custom_param_list)
        logits[:, 1] = 1e4  # the EOS token
        return logits


class OneKindAtATime(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        (token_ids,) = {tuple(params["token_ids"]) for params in custom_param_list or []}
        logits[:, token_ids] = -torch.inf
        return logits


class OneRow(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        assert custom_param_list
        logits[0, custom_param_list[0]["token_ids"]] = -torch.inf
        return logits


class LongestFirst(CustomLogitProcessor):
    """Returns correct rows in another order."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        histories = [len(params["__req__"].output_ids) for params in custom_param_list or []]
        return logits[sorted(range(len(histories)), key=lambda row: -histories[row])]


class OverTheBatch(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits - logits.nan_to_num(neginf=0.0).mean()


class PerRowSoftmax(CustomLogitProcessor):
    """Rounds differently in a batch, which is no mistake."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("cls", [FirstRowsParams, OneRow, LongestFirst, OverTheBatch])
def test_row_depends_on_batch(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls, {"token_ids": [30]})
    assert report["state"].verdict in (Verdict.PASSED, Verdict.FAILED)
    (finding,) = report["rows"].findings
    assert finding.details["expected"] != finding.details["got"]
    assert "custom_param_list[row] belongs to logits[row]" in finding.advice


def test_mismatch_is_reduced_to_two_rows(check: Check) -> None:
    (finding,) = check(FirstRowsParams, {"token_ids": [30]})["rows"].findings
    params = [row["params"]["token_ids"] for row in finding.details["rows"]]
    assert sorted(params) == [[30], [31]]
    assert finding.details["row"] == 1  # row 0 is correct
    assert [finding.details["token"]] in params
    assert f'row 1: params {{"token_ids": {params[1]}}}' in finding.seen
    assert finding.seen.endswith("← this one")


def test_all_rows_of_short_sequences_are_in_one_batch(check: Check) -> None:
    (finding,) = check(EndsAtOnce, {"token_ids": [30]})["rows"].findings
    params = [row["params"]["token_ids"] for row in finding.details["rows"]]
    assert sorted(params) == [[30], [31]]


def test_rows_that_fail_in_one_batch(check: Check) -> None:
    """A server repeats the call row by row, so no request fails, but it is slow."""
    (finding,) = check(OneKindAtATime, {"token_ids": [30]})["rows"].findings
    assert "2 rows that work one by one fail in one batch: ValueError: too many values" in finding.seen
    assert finding.details["failed_together"]
    assert "in __call__" in finding.traceback


def test_rounding_is_tolerated(check: Check) -> None:
    assert check(PerRowSoftmax).ok


def test_sglang_class_fails(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's class applies one list to all rows, and asserts that all rows have the same one."""
    peers = Path(__file__).parents[3] / "peers" / "sglang_peer.py"
    spec = importlib.util.spec_from_file_location("sglang_peer_for_check", peers)
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, peer)  # its dataclasses look there
    spec.loader.exec_module(peer)
    tree = ast.parse((peer._unpacked() / "sglang/srt/sampling/custom_logit_processor.py").read_text())
    name = "DisallowedTokensLogitsProcessor"
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    file = tmp_path / "sglangs.py"
    header = "from typing import *\nimport torch\nfrom logitship import CustomLogitProcessor\n"
    file.write_text(f"{header}\n{ast.unparse(node)}\n")
    report = check(import_class(str(file)), {"token_ids": [30]})
    assert [finding.check for finding in report.findings] == ["rows"]
    assert "AssertionError" in report["rows"].findings[0].seen


class SlowTogether(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        while len(logits) > 1:
            pass
        return logits


class SlowAfterOthers(CustomLogitProcessor):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        self.seen.update(params["__req__"].rid for params in custom_param_list or [])
        while len(self.seen) > 1:
            pass
        return logits


class SlowInLargeBatch(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        while len(logits) > 2:
            pass
        return logits


def test_short_sequences_do_not_hang_the_check_in_one_batch(check: Check) -> None:
    """It runs the class in its own process only after a sandbox has had the same batch."""
    assert check(SlowInLargeBatch, max_tokens=2)["rows"].summary.startswith("a call takes too long")


def test_timeout_is_not_reported_as_dependence_on_other_rows(check: Check) -> None:
    report = check(SlowTogether)
    assert report["rows"].summary == "a call takes too long, so no logits could be compared"
    (finding,) = report["rows"].findings
    assert finding.seen.startswith("2 rows in one batch: step 2 of a sequence with random logits fails: ")
    assert "gave no answer within 1 s of CPU time" in finding.seen
    assert finding.advice == "A server calls the processor once for all rows that use it: work on all rows at once."


def test_timeout_is_not_reported_as_shared_state(check: Check) -> None:
    report = check(SlowAfterOthers)
    assert report["state"].summary == "a call takes too long, so no logits could be compared"
    (finding,) = report["state"].findings
    assert finding.seen.startswith("after other sequences in the same sandbox: step 1 of a sequence with ")
    assert "--sandbox-step-timeout" in finding.advice
