"""A small run of `benchmarks/history_step.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "history_step.py"
SMALL = ("--rows", "2", "--lengths", "9", "40", "--turns", "1", "--without-sglang")


def test_each_processor_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(file.read_text())
    assert sorted(each["case"] for each in figures) == [
        "no_repeat_ngram, 3 in all, 40 tokens over 9",
        "no_repeat_ngram, 30 in 90, 40 tokens over 9",
        "qwen3_thinking_budget, 40 tokens over 9",
        "thinking_budget, one token, 40 tokens over 9",
    ]
    assert all(each["ours"] > 0 for each in figures)
