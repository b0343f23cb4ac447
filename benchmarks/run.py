"""Run every benchmark that has a target, and print the targets next to the results.

    python benchmarks/run.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Takes about 20 minutes on two cores. `--write` puts the tables into README.md and docs/performance.md, the figures into
docs/performance.json and the plot into docs/images/performance.svg; `--recorded` writes them again from
docs/performance.json without running anything. The soak test has a script of its own, `soak.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import performance_plot
from comparison import Comparison, arguments, from_json, machine, read
from performance_tables import full_table, readme_table, target_table

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
SCRIPT_TIMEOUT = 600
"""Seconds."""
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def run(script: str, options: argparse.Namespace) -> list[Comparison]:
    """Run a script in a process of its own and return its comparisons.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(Path(__file__).with_name(script)), "--json", str(file)]
        if script in NEED_VLLM:
            command += ["--vllm-python", options.vllm_python]
        subprocess.run(command, check=True, timeout=SCRIPT_TIMEOUT)
        return read(file)


def write(comparisons: Sequence[Comparison], facts: dict[str, str], root: Path = ROOT) -> None:
    """Write the figures, the tables and the plot into the repository.

    Args:
        comparisons: of all benchmarks.
        facts: of the machine, with the `date`.
        root: folder of the repository.
    """
    figures = {"machine": facts, "comparisons": [asdict(each) for each in comparisons]}
    (root / "docs" / "performance.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    write_tables(comparisons, facts, root)
    performance_plot.plot(comparisons, root / "docs" / "images" / "performance.svg")


def write_tables(comparisons: Sequence[Comparison], facts: dict[str, str], root: Path = ROOT) -> None:
    """Replace the tables in README.md and docs/performance.md."""
    about = f"Measured on {facts['date']}: {facts['processor']}, {facts['cores']} cores, PyTorch {facts['torch']}."
    _replace(root / "README.md", [*readme_table(comparisons), "", about])
    tables = [*target_table(comparisons), "", "Each case:", "", *full_table(comparisons)]
    _replace(root / "docs" / "performance.md", [about, "", *tables])


def _replace(page: Path, lines: Sequence[str]) -> None:
    text = "\n".join([BEGIN, *lines, END])
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: text, page.read_text(), flags=re.DOTALL))


def recorded(root: Path = ROOT) -> tuple[list[Comparison], dict[str, str]]:
    """Return the comparisons of docs/performance.json, and the facts of the machine."""
    figures = json.loads((root / "docs" / "performance.json").read_text())
    return [from_json(each) for each in figures["comparisons"]], figures["machine"]


def main() -> None:
    """Measure, print, and write."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="SCRIPT", help="run only these")
    parser.add_argument("--write", action="store_true", help="put the figures into README.md and docs/")
    parser.add_argument("--recorded", action="store_true", help="write the recorded figures again; run nothing")
    options = parser.parse_args()
    if options.recorded:
        write(*recorded())
        return
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
    print("\n" + "\n".join(full_table(comparisons)))
    print("\n" + "\n".join(target_table(comparisons)))
    print(f"\n{time.monotonic() - began:.0f} s on {platform.node() or 'this machine'}")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in comparisons], indent=1) + "\n")
    if options.write:
        write(comparisons, facts)
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
