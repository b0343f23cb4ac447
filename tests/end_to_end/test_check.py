"""`logitship check` as an author calls it: on the default model, in sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = """
import torch
from logitship import CustomLogitProcessor

MARKS = ".!?"

class Sentences(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            request, state = params["__req__"], params["__req__"].state
            new_text = request.tokenizer.decode(request.output_ids[state.get("read", 0):])
            state["read"] = len(request.output_ids)
            state["sentences"] = state.get("sentences", 0) + sum(new_text.count(mark) for mark in MARKS)
            if state["sentences"] >= params["sentences"]:
                logits[row] = -torch.inf
                logits[row, list(request.eos_token_ids)] = 0.0
        return logits

class Counter(Sentences):
    def __init__(self):
        self.calls = 0

    def __call__(self, logits, custom_param_list=None):
        self.calls += 1
        logits[:, self.calls] += 10.0
        return super().__call__(logits, custom_param_list)
"""
COMMAND = "import sys; from logitship.server.cli import main; sys.exit(main())"


def check(folder: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the report."""
    (folder / "author.py").write_text(FILE)
    arguments = ["check", f"author.py:{name}", "--params", '{"sentences": 1}', "--json", "--max-tokens", "12"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_guide_class_passes(tmp_path: Path) -> None:
    status, report = check(tmp_path, "Sentences")
    assert (status, report["ok"], report["counts"]["error"]) == (0, True, 0), report
    assert (report["isolation"], report["vocab_size"]) == ("sandbox", 49152)
    verdicts = {each["name"]: each["verdict"] for each in report["checks"]}
    speed = verdicts.pop("speed")
    assert set(verdicts.values()) == {"passed", "not checked"}
    assert speed in ("passed", "warned")  # it loops over rows, and the machine may be slow
    assert verdicts["argmax"] == "not checked"
    assert [timing["rows"] for timing in report["timings"]] == [1, 8, 64]
    assert report["params"] == [{"sentences": 1}, {"sentences": 2}]


def test_class_with_state_on_self_fails(tmp_path: Path) -> None:
    status, report = check(tmp_path, "Counter")
    assert status == 1
    failed = [each for each in report["checks"] if each["verdict"] == "failed"]
    assert [each["name"] for each in failed] == ["state"]
    assert "self.calls" in failed[0]["findings"][0]["seen"]
