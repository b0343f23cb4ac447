"""A small run of `benchmarks/sandbox_step.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sandbox_step.py"
SMALL = ("--rounds", "1", "--calls", "2", "--threads", "1", "--gap", "0.001", "--history", "60")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_all_cases_are_measured_and_written(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    finished = run(*SMALL, "--shapes", "4x300", "1x70", "--processors", "2", "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    results = json.loads(figures.read_text())["results"]
    # 4 bodies with and without a gap, for one row, and for four rows of one processor and of two.
    assert len(results) == 4 * 2 * 3
    assert [result["case"]["vocab_size"] for result in results] == [70] * 8 + [300] * 16
    for result in results:
        assert set(result["median"]) == set(result["p99"]) == {"in_process", "copies", "sandbox"}
        assert all(0 < result["median"][side] <= result["p99"][side] for side in result["median"])
        assert bool(result["parts"]) == (result["case"]["processors"] == 1)
    heading = "microseconds, medians\n\n"
    assert finished.stdout.count("\n", finished.stdout.index(heading) + len(heading)) == 1 + 16


def test_parts_of_a_step_are_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    finished = run(*SMALL, "--shapes", "2x70", "--bodies", "ban", "--processors", "1", "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    for result in json.loads(figures.read_text())["results"]:
        parts = result["parts"]
        assert list(parts) == [
            *("copy in", "frame", "wake-up", "parse", "call", "answer", "return", "copy out", "check"),
        ]
        # Both processes share a clock: none of these spans can be negative, and a call takes time.
        assert all(parts[name] > 0 for name in ("copy in", "frame", "parse", "call", "answer", "copy out", "check"))
        assert parts["wake-up"] + parts["parse"] > 0
        assert parts["return"] + parts["answer"] > 0


def test_unknown_body_is_refused() -> None:
    finished = run("--bodies", "none")
    assert finished.returncode == 2
    assert "invalid choice: 'none'" in finished.stderr
