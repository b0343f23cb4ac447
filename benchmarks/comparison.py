"""Comparisons of two sides that take turns, and their report.

Absolute times mean little on a shared machine: what counts is the ratio of two sides that ran one after the other. So
each turn gives a ratio of its own, and a comparison is the median of those, with the quartiles as the spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

OF_PEER: Final = "ours / peer"
OF_OURS: Final = "peer / ours"
RatioKind = Literal["ours / peer", "peer / ours"]


@dataclass(frozen=True)
class Target:
    """Bound that a ratio should reach."""

    bound: float
    at_least: bool

    def is_met(self, ratio: float) -> bool:
        """Return whether a ratio reaches the bound."""
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


def at_least(bound: float) -> Target:
    """Return the target of a ratio that should be `bound` or more."""
    return Target(bound, at_least=True)


def at_most(bound: float) -> Target:
    """Return the target of a ratio that should be `bound` or less."""
    return Target(bound, at_least=False)


@dataclass(frozen=True)
class Comparison:
    """One case of a benchmark.

    Attributes:
        benchmark: name of the benchmark, under which the tables group the cases.
        case: what was measured, in a few words.
        unit: of `ours` and `peer`.
        ours: logitship's median over the turns.
        peer: the peer's; None if there is no peer and the target is about `ours` itself.
        peer_name: name of the peer.
        kind: which of the two is divided by the other.
        ratio: median of the turns' ratios; `ours` where there is no peer.
        low: lower quartile of the ratios.
        high: upper quartile of the ratios.
        turns: number of turns.
        target: None: for information.
    """

    benchmark: str
    case: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    kind: RatioKind
    ratio: float
    low: float
    high: float
    turns: int
    target: Target | None

    @property
    def is_met(self) -> bool | None:
        """True if the target is met; None without a target."""
        return None if self.target is None else self.target.is_met(self.ratio)


def compare(
    benchmark: str,
    case: str,
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    unit: str,
    peer_name: str,
    kind: RatioKind,
    target: Target | None = None,
) -> Comparison:
    """Compare two sides, each given as one value per turn."""
    pairs = zip(ours, peer, strict=True)
    ratios = [a / b if kind == OF_PEER else b / a for a, b in pairs]
    low, high = _quartiles(ratios)
    medians = statistics.median(ours), statistics.median(peer), statistics.median(ratios)
    return Comparison(
        benchmark, case, unit, medians[0], medians[1], peer_name, kind, medians[2], low, high, len(ratios), target
    )


def alone(benchmark: str, case: str, ours: Sequence[float], *, unit: str, target: Target | None = None) -> Comparison:
    """Make a comparison without a peer, for a target that is an absolute figure."""
    low, high = _quartiles(ours)
    median = statistics.median(ours)
    return Comparison(benchmark, case, unit, median, None, "", OF_PEER, median, low, high, len(ours), target)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def seconds_of(call: Callable[[], object], calls: int = 1, prepare: Callable[[], object] | None = None) -> float:
    """Return the median duration of several calls. Garbage is collected before them and not during them.

    Args:
        call: is timed.
        calls: number of calls.
        prepare: called before each, and not timed.
    """
    durations = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            call()
            durations.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return statistics.median(durations)


def in_turns(sides: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """Let the sides take turns, each time in a different order: the side before may have left the machine busy.

    Returns:
        For each side, its value in each turn.
    """
    values: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        for offset in range(len(sides)):
            side = (turn + offset) % len(sides)
            values[side].append(sides[side]())
    return values


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM 0.32.0")
    return parser


def print_machine(threads: int) -> dict[str, str]:
    """Set the number of PyTorch threads; print and return the facts about the machine."""
    import torch  # late: other benchmarks import this module in processes without torch

    torch.set_num_threads(threads)
    facts = machine(threads)
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    return facts


def report(comparisons: Iterable[Comparison], file: Path | None) -> list[Comparison]:
    """Print each comparison as soon as it is measured, then write all of them to the file, if one is given."""
    print(f"{'case':<52} {'logitship':>10} {'peer':>10} {'unit':<9} {'ratio':>8} {'quartiles':>17} {'target':>8}")
    made = list(_printed(comparisons))
    if file is not None:
        file.write_text(json.dumps([asdict(each) for each in made], indent=1) + "\n")
    return made


def _printed(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    for each in comparisons:
        peer = "-" if each.peer is None else f"{each.peer:.4g}"
        target = "" if each.target is None else f"{each.target}{'' if each.is_met else ' MISSED'}"
        spread = f"{each.low:.3f} to {each.high:.3f}"
        print(
            f"{each.case:<52} {each.ours:10.4g} {peer:>10} {each.unit:<9} {each.ratio:8.3f} {spread:>17} {target:>8}",
            flush=True,
        )
        yield each


def read(file: Path) -> list[Comparison]:
    """Read a file that `report` wrote."""
    return [from_json(each) for each in json.loads(file.read_text())]


def from_json(fields: dict[str, Any]) -> Comparison:
    """Make a comparison from its JSON object."""
    target = fields["target"]
    return Comparison(**{**fields, "target": None if target is None else Target(**target)})


def machine(threads: int | None = None) -> dict[str, str]:
    """Return the facts about the machine that the figures depend on.

    Args:
        threads: number of PyTorch threads; None if that depends on the benchmark.
    """
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": version("torch"),
        **({} if threads is None else {"threads": str(threads)}),
    }
