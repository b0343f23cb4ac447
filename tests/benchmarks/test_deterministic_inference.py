"""A small run of `benchmarks/deterministic_inference.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from logitship.server.model.model_loader import LoadedModel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "deterministic_inference.py"


def test_all_cases_are_measured_and_written(tmp_path: Path, float32_model: LoadedModel) -> None:
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    float32_model.model.save_pretrained(model)
    float32_model.tokenizer.hf_tokenizer.save_pretrained(model)
    sizes = ("--rows", "1", "3", "--history", "4", "--prompts", "20", "--rounds", "2", "--threads", "1")
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(model), *sizes, "--json", str(figures)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(figures.read_text())["results"]
    assert [(each["case"]["rows"], each["case"]["prompt"]) for each in results] == [(1, 0), (3, 0), (1, 20)]
    for result in results:
        assert set(result["median"]) == set(result["fastest"]) == {"plain", "deterministic"}
        assert all(0 < result["fastest"][side] <= result["median"][side] for side in result["median"])
        assert result["ratio"] > 0
