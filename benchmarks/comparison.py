"""Two sides of a benchmark in turns, and what one says of them.

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
    """What a ratio should be: at least, or at most, so much."""

    bound: float
    at_least: bool

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio reaches it."""
        return ratio >= self.bound if self.at_least else ratio <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


def at_least(bound: float) -> Target:
    """The ratio should be so much or more."""
    return Target(bound, at_least=True)


def at_most(bound: float) -> Target:
    """The ratio should be so much or less."""
    return Target(bound, at_least=False)


@dataclass(frozen=True)
class Comparison:
    """One case of a benchmark.

    Attributes:
        benchmark: which line of the summary it belongs to.
        case: what was measured, in a few words.
        unit: of `ours` and `peer`.
        ours: median of the turns.
        peer: the same, of the other side; None if there is none, and the target is about `ours` itself.
        peer_name: who that is.
        kind: how the two make the ratio.
        ratio: median of the turns' ratios; `ours` where there is no peer.
        low: their lower quartile.
        high: their upper quartile.
        turns: how many there were.
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
        """Whether the target is; None without one."""
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
    """What the turns of two sides say: the two sequences have a value a turn."""
    pairs = zip(ours, peer, strict=True)
    ratios = [a / b if kind == OF_PEER else b / a for a, b in pairs]
    low, high = _quartiles(ratios)
    medians = statistics.median(ours), statistics.median(peer), statistics.median(ratios)
    return Comparison(
        benchmark, case, unit, medians[0], medians[1], peer_name, kind, medians[2], low, high, len(ratios), target
    )


def alone(benchmark: str, case: str, ours: Sequence[float], *, unit: str, target: Target | None = None) -> Comparison:
    """What one side's turns say, where a promise is a figure of its own."""
    low, high = _quartiles(ours)
    median = statistics.median(ours)
    return Comparison(benchmark, case, unit, median, None, "", OF_PEER, median, low, high, len(ours), target)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def seconds_of(call: Callable[[], object], calls: int = 1, prepare: Callable[[], object] | None = None) -> float:
    """How long a call takes: the median of so many. Garbage is collected before, not meanwhile.

    Args:
        prepare: called before each, and not timed.
    """
    taken = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return statistics.median(taken)


def in_turns(sides: Sequence[Callable[[], float]], turns: int) -> list[list[float]]:
    """Let the sides take turns, beginning with another one each time: what ran before may have left the machine busy.

    Returns:
        For each side, what it said in each turn.
    """
    said: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        for place in range(len(sides)):
            side = (turn + place) % len(sides)
            said[side].append(sides[side]())
    return said


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks understand."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM 0.32.0")
    return parser


def report(comparisons: Iterable[Comparison], file: Path | None) -> list[Comparison]:
    """Print each comparison as it comes, then write all of them to a file, if there is one."""
    print(f"{'case':<52} {'ours':>10} {'peer':>10} {'unit':<9} {'ratio':>8} {'quartiles':>17} {'target':>8}")
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
    """What `report` wrote."""
    return [_comparison(each) for each in json.loads(file.read_text())]


def _comparison(fields: dict[str, Any]) -> Comparison:
    target = fields.pop("target")
    return Comparison(**fields, target=None if target is None else Target(**target))


def machine(threads: int | None = None) -> dict[str, str]:
    """What figures depend on.

    Args:
        threads: that PyTorch had; None: it depends on the benchmark.
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
