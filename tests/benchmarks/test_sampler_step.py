"""A small run of `benchmarks/sampler_step.py` without vLLM; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sampler_step.py"
SMALL = ["--vocab", "70", "600", "--rows", "1", "3", "--turns", "1", "--seconds", "0.001", "--threads", "1"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_all_cases_are_measured_and_written(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    finished = run(*SMALL, "--shapes", "peaked", "flat", "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    written = json.loads(figures.read_text())
    # 2 vocabularies, 2 numbers of rows, 2 shapes, 6 settings.
    assert len({each["case"] for each in written}) == len(written) == 48
    assert all(each["ours"] > 0 and each["peer"] is None and each["target"] is None for each in written)


def test_python_without_vllm_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    finished = run("--vllm-python", str(python), *SMALL)
    assert finished.returncode == 1
    assert "sampler_worker.py vllm ended: its error is above" in finished.stderr
