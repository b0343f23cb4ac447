"""A small run of `benchmarks/metrics_step.py`; the figures themselves are not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "metrics_step.py"


def test_prints_a_line_for_each_case() -> None:
    command = [sys.executable, str(SCRIPT), "--rows", "1", "3", "--processors", "0", "2", "--calls", "10"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    head, *lines = finished.stdout.splitlines()
    assert head.split()[0] == "rows"
    cases = [tuple(map(float, line.split())) for line in lines]
    assert [case[:2] for case in cases] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert all(median >= fastest > 0 for _, _, median, fastest in cases)
