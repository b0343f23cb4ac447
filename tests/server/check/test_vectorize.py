"""Rewrites of loops over rows: the printed code is run, and gives the logits of the loop."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.check.cases import CheckCase, LogitsSource
from logitship.server.check.checks.serializability import serialized
from logitship.server.check.checks.speed import _tested_rewrite
from logitship.server.check.dry_run import DryRun
from logitship.server.check.replay import Recording
from logitship.server.check.row_loops import find_row_loops

VOCAB_SIZE = 12
PARAMS: list[dict[str, Any]] = [
    {"token_ids": [3, 5, 3], "token_id": 4, "bias": 1.5, "on": True},
    {"token_ids": [7], "token_id": 9, "bias": -2.0, "on": False},
    {"token_ids": [], "token_id": 3, "bias": 0.25, "on": True},
]
HEAD = "import torch\nfrom logitship import CustomLogitProcessor\n\nTABLE = [1, 2]\n\n"

REWRITTEN = {
    "subtract a constant": ("r, p in enumerate(ps)", "logits[r, p['token_ids']] -= 1.0"),
    "scale": ("r, p in enumerate(ps)", "logits[r, p['token_ids']] *= 0.5"),
    "divide": ("r, p in enumerate(ps)", "logits[r, p['token_ids']] /= p['bias']"),
    "add": ("i in range(len(ps))", "logits[i, ps[i]['token_ids']] += ps[i]['bias']"),
    "one token": ("r, p in enumerate(ps)", "logits[r, p['token_id']] -= 1.0"),
    "one token, its own value": ("r, p in enumerate(ps)", "logits[r, p['token_id']] = p['bias']"),
    "forbid": ("row, p in enumerate(ps)", "logits[row, p['token_ids']] = -torch.inf"),
    "a tensor of tokens": ("r, p in enumerate(ps)", "logits[r, torch.tensor(p['token_ids']).long()] += 2"),
    "whole rows": ("r, p in enumerate(ps)", "if p['on']:\n    logits[r] *= 0.5"),
    "whole rows, their own value": ("r, p in enumerate(ps)", "logits[r] += p['bias']"),
    "a slice": ("r, p in enumerate(ps)", "logits[r, :4] -= p['bias']"),
    "tokens in turn": ("r, p in enumerate(ps)", "for t in p['token_ids']:\n    logits[r, t] -= 1.0"),
    "tokens in turn, value of a row": (
        "r, p in enumerate(ps)",
        "for t in p['token_ids']:\n    logits[r, t] += p['bias']",
    ),
    "a constant for tokens in turn": ("r, p in enumerate(ps)", "for t in p['token_ids']:\n    logits[r, t] = 0.0"),
    "names in use": ("rows, ids in enumerate(ps)", "columns = ids['token_ids']\nlogits[rows, columns] -= 1.0"),
    "a mask": (
        "r, p in enumerate(ps)",
        "mask = torch.zeros(logits.shape[1], dtype=torch.bool)\nmask[p['token_ids']] = True\n"
        "logits[r] = logits[r].masked_fill(mask, -torch.inf)",
    ),
    "history": ("r, p in enumerate(ps)", "logits[r, p['__req__'].output_ids] -= 1.0"),
}
SILENT = {
    "two writes": ("r, p in enumerate(ps)", "logits[r] -= 1\nlogits[r, p['token_id']] = 9.0"),
    "the write is read": ("r, p in enumerate(ps)", "logits[r] -= 1\nassert logits[r].max() < 50"),
    "it returns": ("r, p in enumerate(ps)", "logits[r] -= 1\nif r == 1:\n    return logits"),
    "tokens that repeat": ("r, p in enumerate(ps)", "for t in p['token_ids']:\n    logits[r, t] *= 0.5"),
    "the last of several": ("r, p in enumerate(ps)", "for k, t in enumerate(p['token_ids']):\n    logits[r, t] = k"),
    "each row sees the last": ("r, p in enumerate(ps)", "logits[r] = logits[r - 1] + 1"),
    "never reached": ("r, p in enumerate(ps)", "if p['bias'] > 90:\n    logits[r, p['token_ids']] -= 1"),
    "other values for each token": ("r, p in enumerate(ps)", "logits[r, [1, 2]] = torch.tensor([1.0, p['bias']])"),
}


class _NoSource:
    def next(self, tokens: Any) -> torch.Tensor:
        raise AssertionError("the sequences are recorded")


def _no_source() -> LogitsSource:
    return _NoSource()


@pytest.fixture
def recordings() -> list[Recording]:
    made = []
    for number, params in enumerate(PARAMS):
        recording = Recording(CheckCase(f"{number}", "random logits", params, [2, 3], _no_source))
        recording.inputs = [
            torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(7 * number + s)) for s in (1, 2)
        ]
        recording.outputs, recording.tokens = list(recording.inputs), [number + 4, number + 5]
        made.append(recording)
    return made


def _class_text(loop: str, body: str) -> str:
    lines = [f"        for {loop}:", *(f"            {line}" for line in body.splitlines()), "        return logits"]
    call = "    def __call__(self, logits, custom_param_list=None):\n        ps = custom_param_list\n"
    return f"{HEAD}class Written(CustomLogitProcessor):\n{call}" + "\n".join(lines).replace(
        "(ps)", "(custom_param_list)"
    )


def _load(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> type[CustomLogitProcessor]:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    found: type[CustomLogitProcessor] = module.Written
    return found


def _advice(cls: type[CustomLogitProcessor], recordings: list[Recording]) -> str:
    dry_run = DryRun(serialized(cls)[0], ModelView(VOCAB_SIZE, frozenset({1}), None))
    (loop, *_) = find_row_loops(cls)
    return _tested_rewrite(loop, dry_run, recordings)


def _outputs(cls: type[CustomLogitProcessor], recordings: list[Recording]) -> list[torch.Tensor]:
    return DryRun(serialized(cls)[0], ModelView(VOCAB_SIZE, frozenset({1}), None)).outputs(recordings)


def _follow(text: str, advice: str) -> str:
    """Edit the source as a reader of the advice would."""
    found = re.fullmatch(
        r"Before the loop:\n(.*)\nIn the loop, instead of line (\d+):\n(.*)\nAfter the loop:\n(.*)", advice, re.DOTALL
    )
    assert found is not None, advice
    before, number, instead, after = found.groups()
    lines = text.splitlines()
    line = int(number) - 1
    margin = re.match(" *", lines[line])[0]  # type: ignore[index]
    lines[line : line + 1] = [margin + each[4:] for each in instead.splitlines()]
    loop = next(index for index, each in enumerate(lines) if each.startswith("        for "))
    end = next(index for index, each in enumerate(lines) if each == "        return logits")
    lines[end:end] = [f"    {each}" for each in after.splitlines()]
    lines[loop:loop] = [f"    {each}" for each in before.splitlines()]
    return "\n".join(lines)


@pytest.mark.parametrize("name", REWRITTEN)
def test_printed_code_gives_the_same_logits(
    name: str, recordings: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _class_text(*REWRITTEN[name])
    cls = _load(tmp_path / "written_loop.py", text, monkeypatch)
    followed = _follow(text, _advice(cls, recordings))
    vectorized = _load(tmp_path / "written_vectorized.py", followed, monkeypatch)
    for one, other in zip(_outputs(cls, recordings), _outputs(vectorized, recordings), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", SILENT)
def test_no_code_that_could_be_wrong(
    name: str, recordings: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = _load(tmp_path / "written_loop.py", _class_text(*SILENT[name]), monkeypatch)
    assert _advice(cls, recordings) == ""


def test_call_defined_outside_its_class(
    recordings: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"{HEAD}__AMOUNT = 1.0\n\n"
        "def edit(self, logits, custom_param_list=None):\n"
        "    for r, p in enumerate(custom_param_list):\n"
        "        logits[r, p['token_ids']] -= __AMOUNT\n"
        "    return logits\n\n"
        "class Written(CustomLogitProcessor):\n"
        "    __call__ = edit\n"
    )
    cls = _load(tmp_path / "written_loop.py", text, monkeypatch)
    assert "logits[rows, columns] -= __AMOUNT" in _advice(cls, recordings)


def test_printed_text(recordings: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = _load(tmp_path / "written_loop.py", _class_text(*REWRITTEN["subtract a constant"]), monkeypatch)
    assert _advice(cls, recordings).splitlines() == [
        "Before the loop:",
        "    rows = []",
        "    columns = []",
        "In the loop, instead of line 10:",
        "    ids = p['token_ids']",
        "    rows += [r] * len(ids)",
        "    columns += ids",
        "After the loop:",
        "    if rows:",
        "        logits[rows, columns] -= 1.0",
    ]


def test_without_a_dry_run_there_is_no_code(
    recordings: list[Recording], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = _load(tmp_path / "written_loop.py", _class_text(*REWRITTEN["scale"]), monkeypatch)
    (loop,) = find_row_loops(cls)
    assert _tested_rewrite(loop, None, recordings) == ""
