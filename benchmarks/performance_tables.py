"""Markdown tables of the recorded figures, for README.md and docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from comparison import Comparison


@dataclass(frozen=True)
class Headline:
    """One row of the README's table: a sentence with one ratio.

    Attributes:
        sentence: with `{ratio}`, and `{cases}` if it is about the median of several cases.
        script: the benchmark that measures it.
        benchmark: `Comparison.benchmark`.
        peer_name: `Comparison.peer_name`.
        case: `Comparison.case`; None: the median of all cases that have the same target as the first one.
        lower_is_better: a ratio below 1 is a win.
        inverted: the sentence has the inverse of the recorded ratio.
    """

    sentence: str
    script: str
    benchmark: str
    peer_name: str
    case: str | None = None
    lower_is_better: bool = False
    inverted: bool = False

    def row(self, comparisons: Sequence[Comparison]) -> tuple[bool, str] | None:
        """Return whether the ratio is a win, and the row; None if nothing was recorded for it."""
        cases = [
            each
            for each in comparisons
            if each.target is not None
            and (each.benchmark, each.peer_name) == (self.benchmark, self.peer_name)
            and self.case in (None, each.case)
        ]
        cases = [each for each in cases if each.target == cases[0].target]
        if not cases:
            return None
        ratio = statistics.median(each.ratio for each in cases)
        if self.inverted:
            ratio = 1 / ratio
        sentence = self.sentence.format(ratio=f"**{number(ratio)}**", cases=len(cases))
        return (
            ratio < 1 if self.lower_is_better else ratio > 1,
            f"| {sentence} | [{self.script}](benchmarks/{self.script}) |",
        )


HEADLINES = (
    Headline(
        "Generates {ratio} times as many tokens per second as vLLM 0.32.0 with 8 concurrent streams",
        "end_to_end.py",
        "end to end",
        "vLLM 0.32.0",
        "8 streams",
    ),
    Headline(
        "Keeps the 99th percentile of the time between two tokens at {ratio} times that of vLLM 0.32.0 "
        "with 8 concurrent streams",
        "end_to_end.py",
        "end to end, p99 between tokens",
        "vLLM 0.32.0",
        "8 streams",
        lower_is_better=True,
    ),
    Headline(
        "Samples with top-p 0.95 {ratio} times as fast as vLLM's `Sampler` on 32 rows of 151,936 logits",
        "sampler_step.py",
        "sampler",
        "vLLM's Sampler",
        "top-p 0.95, 32 x 151936",
    ),
    Headline(
        "Applies the processors that came with requests {ratio} times as fast as SGLang, both without a sandbox "
        "(median of {cases} batches of 32 or 256 rows)",
        "group_step.py",
        "processors without a sandbox",
        "SGLang",
    ),
    Headline(
        "Runs the built-in thinking-budget and n-gram processors {ratio} times as fast as SGLang's "
        "after 8,000 tokens (median of {cases})",
        "history_step.py",
        "history",
        "SGLang",
    ),
    Headline(
        "Processes the 700 tokens of a shared system prompt {ratio} times as fast with the prefix cache as without it",
        "prefix_reuse.py",
        "prefix reuse",
        "no reuse",
        "700 shared tokens",
        inverted=True,
    ),
    Headline(
        "Takes {ratio} times as long per step with 64 HTTP streams as the bare model loop without a server",
        "server_cost.py",
        "server overhead",
        "bare model loop",
        "64 streams of /v1/completions",
        lower_is_better=True,
    ),
    Headline(
        "Takes {ratio} times as long as calling the same processors in a bare Python loop, without a sandbox "
        "(median of {cases} batches)",
        "group_step.py",
        "processors without a sandbox",
        "bare calls",
        lower_is_better=True,
    ),
)
"""At most eight rows."""


def readme_table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the README's table: the wins, then the other headlines."""
    rows = [row for headline in HEADLINES if (row := headline.row(comparisons)) is not None]
    wins = [row for is_win, row in rows if is_win]
    others = [row for is_win, row in rows if not is_win]
    return ["| logitship … | benchmark |", "|---|---|", *wins, *others]


def full_table(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a table with a row for each case that has a target."""
    lines = [
        "| benchmark | case | logitship | peer | ratio | quartiles | target | |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
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


def target_table(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a table with a row for each target: the median and the worst of its cases, and how many meet it."""
    lines = ["| benchmark | compared with | target | median case | worst case | met |", "|---|---|--:|--:|--:|--:|"]
    for (benchmark, peer, target, unit), cases in _by_target(comparisons):
        ratios = sorted((each.ratio for each in cases), reverse=target.startswith("≤"))
        met = sum(bool(each.is_met) for each in cases)
        middle, worst = (f"{number(ratio)} {unit}" for ratio in (statistics.median(ratios), ratios[0]))
        name = f"{benchmark}: {'; '.join(each.case for each in cases)}" if len(cases) <= _MAX_NAMED else benchmark
        lines.append(f"| {name} | {peer or '–'} | {target} {unit} | {middle} | {worst} | {met} of {len(cases)} |")
    return lines


def number(value: float) -> str:
    """Format with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


_MAX_NAMED = 2
"""`target_table` names the cases of a target that has no more than this many."""


def _by_target(comparisons: Iterable[Comparison]) -> Iterator[tuple[tuple[str, str, str, str], list[Comparison]]]:
    groups: dict[tuple[str, str, str, str], list[Comparison]] = {}
    for each in comparisons:
        if each.target is not None:
            unit = "×" if each.peer is not None else each.unit
            groups.setdefault((each.benchmark, each.peer_name, str(each.target), unit), []).append(each)
    yield from groups.items()
