"""Small runs of the benchmarks: each measures its cases and writes them. The figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_CASES = {
    "batch_processors.py --vocab 70 --rows 4 --shares 0.5 --steps 8 --turns 1 --threads 1": 4,
    "builtin_step.py --rows 2 --rounds 1 --calls 2 --lengths 9 40 --processors disallowed_tokens thinking_budget": 4,
    "deterministic_inference.py --rows 1 3 --history 4 --prompts 20 --rounds 2 --threads 1": 3,
    "group_step.py --rows 1 8 --vocab-sizes 128 --turns 1 --without-sglang": 5,
    "history_step.py --rows 2 --lengths 9 40 --turns 1 --without-sglang": 4,
    "noisy_plugins.py --engine logitship --kind sleeps hangs --seconds 1 --settle 0 --streams 2": 2,
    "parallel_samples.py --prompts 3 40 --tokens 1 2 --n 3 --rounds 1": 4,
    "sampler_step.py --vocab 70 --rows 1 --shapes peaked --turns 1 --seconds 0.001 --threads 1": 6,
    "sampling_masks.py --streams 1 2 --top-p 0.9 --tokens 3 --rounds 1": 2,
    "sandbox_step.py --rounds 1 --calls 2 --threads 1 --gap 0.001 --history 60 --shapes 2x70 --processors 1": 8,
}
"""Number of cases that each command line measures."""
WITH_A_MODEL = ("deterministic_inference.py", "noisy_plugins.py", "parallel_samples.py", "sampling_masks.py")


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script, *options = command.split()
    line = [sys.executable, str(BENCHMARKS / script), *options, *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("command", NUM_CASES, ids=lambda command: command.split()[0])
def test_all_cases_are_measured_and_written(command: str, model_folder: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    model = ["--model", str(model_folder)] if command.startswith(WITH_A_MODEL) else []
    finished = run(command, *model, "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    written = json.loads(figures.read_text())
    cases = written["results"] if isinstance(written, dict) else written
    assert len({str(each) for each in cases}) == len(cases) == NUM_CASES[command]
    assert all(any(number > 0 for number in numbers(each)) for each in cases)


def test_metrics_step_prints_a_line_for_each_case() -> None:
    finished = run("metrics_step.py --rows 1 3 --processors 0 2 --calls 10")
    assert finished.returncode == 0, finished.stderr
    _, *lines = finished.stdout.splitlines()
    assert [tuple(map(int, line.split()[:2])) for line in lines] == [(1, 0), (1, 2), (3, 0), (3, 2)]


def test_python_without_vllm_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    finished = run("sampler_step.py --vocab 70 --rows 1 --turns 1 --seconds 0.001", "--vllm-python", str(python))
    assert finished.returncode == 1
    assert "sampler_worker.py vllm ended: its error is above" in finished.stderr
