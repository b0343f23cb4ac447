"""The benchmark runs, in small and without vLLM. Nothing is timed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "top_k_top_p.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_it_measures_every_case_and_writes_the_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--vocab", "70", "600", "--rows", "1", "3", "--rounds", "1", "--calls", "1", "--threads", "1"]
    finished = run(*small, "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    written = json.loads(figures.read_text())
    # 2 stages, 2 vocabularies, 2 numbers of rows, 2 shapes, 4 settings.
    assert len(written["results"]) == 64
    assert finished.stdout.count("\ndraw ") == finished.stdout.count("\nsampler ") == 32
    for result in written["results"]:
        assert 0 < result["fastest"]["logitship"] <= result["median"]["logitship"]
        assert result["ratio_of_medians"] is None
    assert written["machine"]["threads"] == "1"


def test_a_python_without_vllm_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    finished = run("--vllm-python", str(python), "--vocab", "70", "--rows", "1", "--rounds", "1", "--calls", "1")
    assert finished.returncode == 1
    assert "the process of vllm ended" in finished.stderr
