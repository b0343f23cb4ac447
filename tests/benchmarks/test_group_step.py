"""A small run of `benchmarks/group_step.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "group_step.py"
SMALL = ("--rows", "1", "8", "--vocab-sizes", "128", "--turns", "1", "--without-sglang")


def test_each_arrival_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(file.read_text())
    assert [each["case"] for each in figures] == [
        "forbid 1×128, 1 group, vs. bare calls",
        "forbid 1×128, 1 group, on top of bare calls",
        "forbid 8×128, 1 group, vs. bare calls",
        "forbid 8×128, 4 groups adjacent, vs. bare calls",
        "forbid 8×128, 4 groups interleaved, vs. bare calls",
    ]
    assert all(each["ours"] > 0 for each in figures if each["unit"] == "µs")
