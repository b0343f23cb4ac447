"""Run every benchmark whose figure is promised, and print one table of what was promised and what was measured.

    python benchmarks/run.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Takes under 20 minutes on two cores. `--write` puts the table into README.md and docs/performance.md, the figures into
docs/performance.json and the plot into docs/images/performance.svg. The soak has a script of its own, `soak.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import performance_plot
from comparison import Comparison, arguments, machine, read

ROOT = Path(__file__).parent.parent
SCRIPTS = (
    "group_step.py",
    "history_step.py",
    "batch_processors.py",
    "sampler_step.py",
    "end_to_end.py",
    "server_cost.py",
    "bystanders.py",
    "start_times.py",
    "prefix_reuse.py",
)
NEED_VLLM = ("batch_processors.py", "sampler_step.py", "end_to_end.py")
LONGEST = 600
"""Seconds for a script."""
_NAMED = 2
"""So many cases have their names in the short table."""
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def run(script: str, options: argparse.Namespace) -> list[Comparison]:
    """The comparisons of a script, which runs in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(Path(__file__).with_name(script)), "--json", str(file)]
        if script in NEED_VLLM:
            command += ["--vllm-python", options.vllm_python]
        subprocess.run(command, check=True, timeout=LONGEST)
        return read(file)


def summary(comparisons: Iterable[Comparison]) -> list[str]:
    """The table, in Markdown: a line for each case that has a target."""
    lines = ["| benchmark | case | ours | peer | ratio | quartiles | target | |", "|---|---|--:|--:|--:|--:|--:|---|"]
    for each in comparisons:
        if each.target is None:
            continue
        peer = "" if each.peer is None else f"{number(each.peer)} {each.unit} ({each.peer_name})"
        ratio = f"{number(each.ratio)}{'' if each.peer is None else ' ×'}"
        spread = f"{number(each.low)} to {number(each.high)}"
        met = "met" if each.is_met else "**missed**"
        lines.append(
            f"| {each.benchmark} | {each.case} | {number(each.ours)} {each.unit} | {peer} | {ratio} | {spread} "
            f"| {each.target} | {met} |"
        )
    return lines


def short_summary(comparisons: Sequence[Comparison]) -> list[str]:
    """The same with a line a benchmark and target: the middle and the worst of its cases; few cases are named."""
    lines = ["| benchmark | beside | target | median case | worst case | met |", "|---|---|--:|--:|--:|--:|"]
    groups: dict[tuple[str, str, str, str], list[Comparison]] = {}
    for each in comparisons:
        if each.target is not None:
            unit = "×" if each.peer is not None else each.unit
            groups.setdefault((each.benchmark, each.peer_name, str(each.target), unit), []).append(each)
    for (benchmark, peer, target, unit), cases in groups.items():
        ratios = sorted((each.ratio for each in cases), reverse=target.startswith("≤"))
        met = sum(bool(each.is_met) for each in cases)
        middle, worst = (f"{number(ratio)} {unit}" for ratio in (statistics.median(ratios), ratios[0]))
        name = f"{benchmark}: {'; '.join(each.case for each in cases)}" if len(cases) <= _NAMED else benchmark
        lines.append(f"| {name} | {peer or '–'} | {target} {unit} | {middle} | {worst} | {met} of {len(cases)} |")
    return lines


def number(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(comparisons: Sequence[Comparison], facts: dict[str, str]) -> None:
    """Put the figures where people read them."""
    about = f"Measured on {facts['date']}: {facts['processor']}, {facts['cores']} cores, PyTorch {facts['torch']}."
    _replace(ROOT / "README.md", [*short_summary(comparisons), "", about])
    _replace(ROOT / "docs" / "performance.md", [about, "", *summary(comparisons)])
    figures = {"machine": facts, "comparisons": [asdict(each) for each in comparisons]}
    (ROOT / "docs" / "performance.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    performance_plot.draw(comparisons, ROOT / "docs" / "images" / "performance.svg")


def _replace(page: Path, lines: Sequence[str]) -> None:
    text = "\n".join([BEGIN, *lines, END])
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: text, page.read_text(), flags=re.DOTALL))


def main() -> None:
    """Measure, print, and write."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="SCRIPT", help="run these alone")
    parser.add_argument("--write", action="store_true", help="put the figures into README.md and docs/")
    options = parser.parse_args()
    scripts = [script for script in options.only if options.vllm_python or script not in NEED_VLLM]
    if not options.vllm_python:
        print("left out without --vllm-python: " + ", ".join(NEED_VLLM))
    began = time.monotonic()
    comparisons: list[Comparison] = []
    failed = []
    for script in scripts:
        since = time.monotonic()
        print(f"\n{script}", flush=True)
        try:
            comparisons += run(script, options)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            failed.append(script)
        print(f"{time.monotonic() - since:.0f} s", flush=True)
    facts = {**machine(), "date": date.today().isoformat()}
    print("\n" + "\n".join(summary(comparisons)))
    print("\n" + "\n".join(short_summary(comparisons)))
    print(f"\n{time.monotonic() - began:.0f} s on {platform.node() or 'this machine'}")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in comparisons], indent=1) + "\n")
    if options.write:
        write(comparisons, facts)
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
