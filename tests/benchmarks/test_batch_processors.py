"""A small run of `benchmarks/batch_processors.py` without vLLM; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "batch_processors.py"
SMALL = ("--vocab", "70", "--rows", "4", "--shares", "0.5", "--steps", "8", "--turns", "1", "--threads", "1")


def test_all_cases_are_measured_and_written(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), *SMALL, "--json", str(figures)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    written = json.loads(figures.read_text())
    # All three processors together, and each of them.
    assert len({each["case"] for each in written}) == len(written) == 4
    assert all(each["ours"] > 0 and each["peer"] is None for each in written)
