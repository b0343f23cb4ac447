"""A small run of `benchmarks/builtin_step.py`; the figures themselves are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "builtin_step.py"
SMALL = ("--rows", "2", "--rounds", "1", "--calls", "2", "--lengths", "9", "40")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def figures(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results, by case."""
    finished = run(*SMALL, *arguments, "--json", str(folder / "figures.json"))
    assert finished.returncode == 0, finished.stderr
    results = json.loads((folder / "figures.json").read_text())["results"]
    table = finished.stdout[finished.stdout.index("growth: ") :].splitlines()[4:]
    assert [line[:34].strip() for line in table] == [result["case"] for result in results]
    return {result["case"]: result for result in results}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return figures(tmp_path_factory.mktemp("figures"))


def test_each_case_is_timed_at_each_length(results: dict[str, Any]) -> None:
    names = {case.partition(",")[0] for case in results}
    assert names >= {"disallowed_tokens", "no_repeat_ngram", "qwen3_thinking_budget", "thinking_budget"}
    assert "thinking_token_budget" in names, "batch processors too"
    for result in results.values():
        for times in (result["median"], result["fastest"]):
            assert all(list(of_side) == ["9", "40"] for of_side in times.values())
        for side, medians in result["median"].items():
            assert all(0 < result["fastest"][side][length] <= median for length, median in medians.items())


def test_processors_of_sglang_are_timed_on_both_sides(results: dict[str, Any]) -> None:
    timed = {case.partition(",")[0] for case, result in results.items() if "sglang" in result["median"]}
    assert timed == {
        "deepseek_r1_thinking_budget",
        "disallowed_tokens",
        "glm4_moe_thinking_budget",
        "inkling_thinking_budget",
        "no_repeat_ngram",
        "qwen3_thinking_budget",
        "thinking_budget",
    }


def test_selected_processors_without_sglang(tmp_path: Path) -> None:
    some = figures(tmp_path, "--without-sglang", "--processors", "disallowed_tokens")
    assert list(some) == ["disallowed_tokens, one list", "disallowed_tokens, each its own"]
    assert all(list(result["median"]) == ["logitship"] for result in some.values())


def test_unknown_processor_is_refused() -> None:
    finished = run("--processors", "none")
    assert finished.returncode == 2
    assert "invalid choice: 'none'" in finished.stderr
