"""A short run of the soak benchmark: all kinds of requests against a real server with sandboxes, and no leaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SMALL = ("--requests", "150", "--warm-up", "60", "--quiet-every", "90", "--sample-every", "50", "--sandboxes", "10")


def test_short_soak(tmp_path: Path) -> None:
    figures_file, plot = tmp_path / "soak.json", tmp_path / "soak.svg"
    finished = subprocess.run(
        # Memory growth is only checked in the long run: this one is too short to warm up.
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
