"""The tables of README.md and docs/performance.md, and the recorded figures that they are made of."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import run as run_benchmarks
from comparison import OF_OURS, OF_PEER, Comparison, at_least, at_most
from performance_tables import HEADLINES, Headline, full_table, number, readme_table, target_table

ROOT = run_benchmarks.ROOT


def make_comparison(case: str = "case", ratio: float = 2.0) -> Comparison:
    return Comparison("speed", case, "ms", 1.0, ratio, "peer", OF_OURS, ratio, 1.0, 3.0, 5, at_least(1.5))


HEADLINE = Headline("Runs {ratio} times as fast as the peer (median of {cases})", "speed.py", "speed", "peer")


def test_pages_have_the_tables_of_the_recorded_figures(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/performance.md"):
        shutil.copy(ROOT / page, tmp_path / page)
    run_benchmarks.write_tables(*run_benchmarks.recorded(), tmp_path)
    for page in ("README.md", "docs/performance.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), "run `python benchmarks/run.py --recorded`"


def test_readme_table_has_a_row_for_each_headline_and_wins_first() -> None:
    comparisons, _ = run_benchmarks.recorded()
    rows = readme_table(comparisons)[2:]
    assert len(rows) == len(HEADLINES) <= 8
    assert all(len(re.findall(r"\*\*[\d,.]+\*\*", row)) == 1 for row in rows)
    is_win = {row: win for headline in HEADLINES if (found := headline.row(comparisons)) for win, row in [found]}
    assert [is_win[row] for row in rows] == sorted(is_win.values(), reverse=True)
    assert rows[0].startswith("| Generates **1.96** times as many tokens per second as vLLM 0.32.0 with 8 concurrent")


def test_headlines_name_existing_scripts() -> None:
    assert all((ROOT / "benchmarks" / headline.script).is_file() for headline in HEADLINES)


def test_headline_takes_the_median_of_its_cases() -> None:
    comparisons = [make_comparison("a", 2.0), make_comparison("b", 3.0), make_comparison("c", 10.0)]
    assert HEADLINE.row(comparisons) == (
        True,
        "| Runs **3** times as fast as the peer (median of 3) | [speed.py](benchmarks/speed.py) |",
    )


def test_headline_about_one_case() -> None:
    comparisons = [make_comparison("a", 2.0), make_comparison("b", 3.0)]
    assert "**2**" in str(replace(HEADLINE, case="a").row(comparisons))


def test_headline_leaves_out_cases_with_another_target_or_none() -> None:
    comparisons = [
        make_comparison("a", 2.0),
        replace(make_comparison("b", 0.5), target=at_most(1.0)),
        replace(make_comparison("c", 9.0), target=None),
    ]
    assert "median of 1" in str(HEADLINE.row(comparisons))


def test_headline_without_figures_has_no_row() -> None:
    assert HEADLINE.row([]) is None


@pytest.mark.parametrize(
    ("ratio", "lower_is_better", "is_win"),
    [(2.0, False, True), (0.5, False, False), (2.0, True, False), (0.5, True, True)],
)
def test_headline_tells_wins_from_losses(ratio: float, lower_is_better: bool, is_win: bool) -> None:
    row = replace(HEADLINE, lower_is_better=lower_is_better).row([make_comparison(ratio=ratio)])
    assert row is not None
    assert row[0] is is_win


def test_inverted_headline() -> None:
    row = replace(HEADLINE, inverted=True).row([replace(make_comparison(ratio=0.1), kind=OF_PEER)])
    assert row is not None
    assert row[0]
    assert "**10**" in row[1]


def test_full_table_marks_missed_targets() -> None:
    missed = replace(make_comparison("b", 1.0), peer=None, peer_name="")
    assert full_table([make_comparison("a"), missed, replace(missed, target=None)])[2:] == [
        "| speed | a | 1 ms | 2 ms (peer) | 2 × | 1 to 3 | ≥ 1.5 | met |",
        "| speed | b | 1 ms |  | 1 | 1 to 3 | ≥ 1.5 | **missed** |",
    ]


def test_target_table_has_the_median_and_the_worst_case() -> None:
    comparisons = [make_comparison("a", 1.0), make_comparison("b", 3.0), make_comparison("c", 2.0)]
    assert target_table(comparisons)[2:] == ["| speed | peer | ≥ 1.5 × | 2 × | 1 × | 2 of 3 |"]
    assert target_table(comparisons[:2])[2:] == ["| speed: a; b | peer | ≥ 1.5 × | 2 × | 1 × | 1 of 2 |"]


@pytest.mark.parametrize(
    ("value", "text"), [(1.957, "1.96"), (670.3, "670"), (104_033.4, "104,033"), (0.0443, "0.0443")]
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text
