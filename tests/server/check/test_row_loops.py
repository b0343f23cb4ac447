"""Search for the loop over rows that a line is in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, Row, RowProcessor
from logitship.client.check_report import SlowLine
from logitship.server.check.row_loops import row_loop_around

Rows = list[dict[str, Any]] | None


class Enumerates(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            if params["token_ids"]:
                logits[row, params["token_ids"]] = -torch.inf  # slowest
        return logits


class Indexes(CustomLogitProcessor):
    def __call__(self, scores: torch.Tensor, params_list: Rows = None) -> torch.Tensor:
        for i in range(len(scores)):
            scores[i, 3] += 1  # slowest
        return scores


def edit(self: Any, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
    for row, params in zip(logits, custom_param_list or [], strict=True):
        row[params["token_ids"]] = -torch.inf  # slowest
    return logits


class Assigned(CustomLogitProcessor):
    __call__ = edit


class LoopsOverTokens(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        ids = [token for params in custom_param_list or [] for token in params["token_ids"]]
        for token in ids:
            logits[:, token] = 0  # slowest
        return logits


class SlowAfterLoop(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        ids = []
        for params in custom_param_list or []:
            ids += params["token_ids"]
        return logits.index_fill_(1, torch.tensor(ids), 0)  # slowest


class Edits(RowProcessor):
    def edit(self, row: Row) -> None:
        row.forbid(1)  # slowest


def slowest_line(cls: type) -> SlowLine:
    lines, first = inspect.getsourcelines(edit if cls is Assigned else cls)
    (offset,) = [offset for offset, line in enumerate(lines) if line.endswith("# slowest\n")]
    return SlowLine(__file__, first + offset, lines[offset].strip(), 1.0, 100.0)


@pytest.mark.parametrize("cls", [Enumerates, Indexes, Assigned])
def test_loop_around_slowest_line(cls: type[CustomLogitProcessor]) -> None:
    loop = row_loop_around(cls, slowest_line(cls))
    assert loop is not None
    assert loop.lineno == (edit.__code__ if cls is Assigned else cls.__call__.__code__).co_firstlineno + 1


@pytest.mark.parametrize("cls", [LoopsOverTokens, SlowAfterLoop, Edits])
def test_no_loop_over_rows_around_slowest_line(cls: type[CustomLogitProcessor]) -> None:
    assert row_loop_around(cls, slowest_line(cls)) is None


def test_line_of_another_file() -> None:
    assert row_loop_around(Enumerates, SlowLine("/elsewhere/helpers.py", 21, "", 1.0, 100.0)) is None


def test_class_without_source_has_no_loops() -> None:
    names: dict[str, Any] = {"CustomLogitProcessor": CustomLogitProcessor}
    exec("class Typed(CustomLogitProcessor):\n    def __call__(self, logits, params=None): return logits", names)
    assert row_loop_around(names["Typed"], SlowLine("<string>", 2, "", 1.0, 100.0)) is None
