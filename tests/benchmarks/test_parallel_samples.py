"""A small run of `benchmarks/parallel_samples.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from logitship.server.model.model_loader import LoadedModel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parallel_samples.py"


def test_all_cases_are_measured_and_written(tmp_path: Path, float32_model: LoadedModel) -> None:
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    float32_model.model.save_pretrained(model)
    float32_model.tokenizer.hf_tokenizer.save_pretrained(model)
    sizes = ("--prompts", "3", "40", "--tokens", "1", "2", "--n", "3", "--rounds", "1")
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(model), *sizes, "--json", str(figures)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(figures.read_text())["results"]
    assert [(each["prompt_tokens"], each["output_tokens"]) for each in results] == [(3, 1), (40, 1), (3, 2), (40, 2)]
    for result in results:
        assert set(result["seconds"]) == {"one", "n", "separate"}
        assert min(*result["seconds"].values(), result["n_over_one"], result["separate_over_n"]) > 0
