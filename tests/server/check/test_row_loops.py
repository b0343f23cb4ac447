"""Search for loops over rows, and the advice on vectorizing them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, Row, RowProcessor
from logitship.server.check.row_loops import RowLoop, find_row_loops

Rows = list[dict[str, Any]] | None


class Enumerates(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, params["token_ids"]] = -torch.inf
        return logits


class Adds(CustomLogitProcessor):
    def __call__(self, scores: torch.Tensor, params_list: Rows = None) -> torch.Tensor:
        for i in range(len(scores)):
            assert params_list
            scores[i, params_list[i]["token_ids"]] += params_list[i]["bias"]
        return scores


class Zips(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or [], strict=True):
            params["seen"] = True
            row[params["token_ids"]] = -torch.inf
        return logits


class WholeRows(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            if params["end"]:
                logits[row] = -torch.inf
        return logits


class Masks(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            mask = torch.zeros(logits.shape[1], dtype=torch.bool)
            mask[params["token_ids"]] = True
            logits[row] = logits[row].masked_fill(mask, -torch.inf)
        return logits


class Reads(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            request = params["__req__"]
            text = request.tokenizer.decode(request.output_ids)
            if len(request.output_ids) > 3 and text.endswith(".") and logits[row].max().item() > 3:
                seen = set(request.output_ids)
                logits[row, list(seen)] = 0
        return logits


class Tokenizes(CustomLogitProcessor):
    tokenizer: Any = None

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            logits[row, self.tokenizer(params["text"])] = 0
        return logits


def edit(self: Any, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
    for row, params in enumerate(custom_param_list or []):
        logits[row, params["token_ids"]] = -torch.inf
    return logits


class Assigned(CustomLogitProcessor):
    __call__ = edit


class NoLoop(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        ids = [token for params in custom_param_list or [] for token in params["token_ids"]]
        for token in ids:
            logits[:, token] = 0
        return logits


def loop_of(cls: type[CustomLogitProcessor]) -> RowLoop:
    (loop,) = find_row_loops(cls)
    return loop


def test_loop_location_and_text() -> None:
    loop = loop_of(Enumerates)
    assert loop.text == "for row, params in enumerate(custom_param_list or []):"
    assert loop.location.startswith("test_row_loops.py:")
    assert loop.file == __file__


@pytest.mark.parametrize("cls", [Enumerates, Adds, Zips, WholeRows, Masks, Assigned])
def test_writes_are_found(cls: type[CustomLogitProcessor]) -> None:
    assert "one write for each row. Collect in the loop, and write once after it." in loop_of(cls).advice


def test_advice_on_other_slow_calls() -> None:
    advice = loop_of(Reads).advice
    texts = [line.split(": ", 1)[1] for line in advice.splitlines() if line.startswith("Line ")]
    assert [text.split()[:3] for text in texts] == [
        ["the", "tokenizer's", "decode()"],
        ["reads", "all", "of"],
        [".item()", "copies", "values"],
        ["one", "write", "for"],
    ]
    assert "torch.zeros() makes a tensor" in loop_of(Masks).advice
    assert "the tokenizer for each row and step. Look tokens up once" in loop_of(Tokenizes).advice


def test_other_loops_are_not_reported() -> None:
    assert find_row_loops(NoLoop) == []


def test_class_without_source_has_no_loops() -> None:
    names: dict[str, Any] = {"CustomLogitProcessor": CustomLogitProcessor}
    exec("class Typed(CustomLogitProcessor):\n    def __call__(self, logits, params=None): return logits", names)
    assert find_row_loops(names["Typed"]) == []


class Edits(RowProcessor):
    def edit(self, row: Row) -> None:
        row.forbid(1)


def test_loop_of_row_processor_is_not_the_authors() -> None:
    assert find_row_loops(Edits) == []
