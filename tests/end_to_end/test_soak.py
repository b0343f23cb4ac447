"""The soak in small: every kind of request against a real server with sandboxes, and nothing left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SMALL = ("--requests", "150", "--warm-up", "60", "--quiet-every", "90", "--sample-every", "50", "--sandboxes", "10")


def test_every_request_ends_as_it_must_and_nothing_is_left_over(tmp_path: Path) -> None:
    figures_file, plot = tmp_path / "soak.json", tmp_path / "soak.svg"
    finished = subprocess.run(
        # Memory is for the long run: there is no warm-up here that deserves the name.
        [sys.executable, str(SCRIPT), *SMALL, "--max-drift", "9", "--json", str(figures_file), "--plot", str(plot)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures = json.loads(figures_file.read_text())
    assert figures["broken"] == figures["failures"] == figures["errors"] == []
    assert sum(figures["outcomes"].values()) == 150
    assert len(figures["outcomes"]) > 25
    quiet = [sample for sample in figures["samples"] if sample["quiet"]]
    assert [sample["requests"] for sample in quiet] == [60, 150]
    assert {sample["engine"]["sandboxes"] for sample in quiet} == {10}
    assert quiet[0]["engine"]["sandboxes_started"] < quiet[-1]["engine"]["sandboxes_started"] - 10
    assert "</svg>" in plot.read_text()
