"""Rows that depend on their company."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.check_report import Verdict
from logitship.server.check.target import load_target

Check = Callable[..., CheckReport]
Rows = list[dict[str, Any]] | None


class FirstRowsParams(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        assert custom_param_list
        logits[:, custom_param_list[0]["token_ids"]] = -torch.inf
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
    """Right but for the order of what it returns."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        histories = [len(params["__req__"].output_ids) for params in custom_param_list or []]
        return logits[sorted(range(len(histories)), key=lambda row: -histories[row])]


class OverTheBatch(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits - logits.nan_to_num(neginf=0.0).mean()


class PerRowSoftmax(CustomLogitProcessor):
    """Rounds another way in a batch than alone: no fault."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("cls", [FirstRowsParams, OneRow, LongestFirst, OverTheBatch])
def test_a_row_that_is_not_what_it_is_alone(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls, {"token_ids": [30]})
    assert report["state"].verdict in (Verdict.PASSED, Verdict.FAILED)
    (finding,) = report["rows"].findings
    assert finding.details["expected"] != finding.details["got"]
    assert "custom_param_list[row] belongs to logits[row]" in finding.advice


def test_the_smallest_example_has_two_rows(check: Check) -> None:
    (finding,) = check(FirstRowsParams, {"token_ids": [30]})["rows"].findings
    params = [row["params"]["token_ids"] for row in finding.details["rows"]]
    assert sorted(params) == [[30], [31]]
    assert finding.details["row"] == 1  # the first is right
    assert [finding.details["token"]] in params
    assert f'row 1: params {{"token_ids": {params[1]}}}' in finding.seen
    assert finding.seen.endswith("← this one")


def test_rows_that_it_does_not_take_together(check: Check) -> None:
    """A server makes the call again row by row, so that no request fails: only slowly, and not everywhere."""
    (finding,) = check(OneKindAtATime, {"token_ids": [30]})["rows"].findings
    assert "2 rows that it takes alone, it does not take together: ValueError: too many values" in finding.seen
    assert finding.details["failed_together"]
    assert "in __call__" in finding.traceback


def test_rounding_is_no_difference(check: Check) -> None:
    assert check(PerRowSoftmax).ok


def test_sglangs_own_class_is_found_out(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one answer for all rows, and asserts that they want the same."""
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
    report = check(load_target(str(file)), {"token_ids": [30]})
    assert [finding.check for finding in report.findings] == ["rows"]
    assert "AssertionError" in report["rows"].findings[0].seen
