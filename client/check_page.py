"""A check's report as a page of text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .check_report import BatchTiming, CheckReport, CheckResult, Finding, Severity, SlowLine, Verdict

WIDTH = 100
_LONGEST_PARAMS = 72
_INDENT = 4

_SIGNS = {Verdict.PASSED: "✓", Verdict.WARNED: "!", Verdict.FAILED: "✗", Verdict.NOT_CHECKED: "-"}
_ASCII = str.maketrans({"✓": "+", "✗": "x", "…": "...", "µ": "u", "←": "<-"})


def page(report: CheckReport, *, ascii_only: bool = False) -> str:
    """The report as text, without a line break at its end.

    Args:
        ascii_only: for a terminal that shows nothing else.
    """
    lines = [*_head(report), ""]
    names = max(len(check.name) for check in report.checks)
    for check in report.checks:
        lines.append(_line(check, names, ignored=check.name in report.ignored))
        if check.name == "speed" and report.timings:
            lines += _speed(report)
        for finding in check.findings:
            lines += _finding(finding)
    lines += ["", _verdict(report)]
    text = "\n".join(lines)
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode() if ascii_only else text


def _head(report: CheckReport) -> Iterator[str]:
    yield f"{report.name}  {report.digest[:26]}{'…' if report.digest else '(does not travel)'}"
    if report.vocab_size:
        where = "in a sandbox" if report.isolation == "sandbox" else "in this process, without a sandbox"
        yield f"on {report.model}, {report.vocab_size:,} tokens, {where}"
    for number, params in enumerate(report.params):
        made_up = ", made of it to tell rows apart" if number >= report.num_given_params else ""
        yield f"{'params' if number == 0 else '   and'} {shown_params(params)}{made_up}"


def _line(check: CheckResult, width: int, *, ignored: bool) -> str:
    return f"{_SIGNS[check.verdict]} {check.name:<{width}}  {check.summary}{' (ignored)' if ignored else ''}"


def _finding(finding: Finding) -> Iterator[str]:
    label = f"{finding.severity.value}: "
    yield from _wrapped(label + finding.seen)
    if finding.traceback:
        yield from (_cut(" " * (_INDENT + 2) + line, WIDTH) for line in finding.traceback.rstrip().splitlines())
    if finding.advice:
        yield from _wrapped(("hint: " if finding.severity is Severity.NOTE else "mend: ") + finding.advice)


def _wrapped(text: str) -> Iterator[str]:
    """Paragraphs with a hanging indentation. Lines that are indented are code, and stay as they are."""
    for number, line in enumerate(text.splitlines()):
        indent = " " * (_INDENT + (2 if number else 0))
        if line.startswith(" "):
            yield indent + line
        else:
            yield from textwrap.wrap(
                line, WIDTH, initial_indent=indent, subsequent_indent=" " * (_INDENT + 2), break_long_words=False
            )


def _speed(report: CheckReport) -> Iterator[str]:
    margin = " " * _INDENT
    yield f"{margin}{'rows':>6}{'µs a row':>12}{'of it yours':>14}{'ms a step':>12}"
    for timing in report.timings:
        yield margin + _timing(timing)
    if report.slow_lines:
        yield f"{margin}slowest lines:"
        places = [f"{_short(line.file)}:{line.line}" for line in report.slow_lines]
        widest = max(map(len, places))
        for place, line in zip(places, report.slow_lines, strict=True):
            yield f"{margin}  {_slow_line(place.ljust(widest), line)}"


def _timing(timing: BatchTiming) -> str:
    own = "-" if timing.own is None else f"{timing.own:,.1f}"
    return f"{timing.rows:>6}{timing.total:>12,.1f}{own:>14}{timing.total * timing.rows / 1e3:>12.2f}"


def _slow_line(place: str, line: SlowLine) -> str:
    room = WIDTH - _INDENT - len(place) - 20
    return f"{place} {line.share:>4.0%} {line.microseconds:>8.1f} µs  {_cut(line.text, room)}"


def _verdict(report: CheckReport) -> str:
    parts = [
        f"{count} {severity.value}{'s' * (count != 1)}"
        for severity in (Severity.ERROR, Severity.WARNING)
        if (count := report.count(severity))
    ]
    return ", ".join(parts) or "No errors, no warnings."


def _short(file: str) -> str:
    return file.rpartition("/")[2]


def shown_params(params: Mapping[str, Any] | Sequence[Any]) -> str:
    """Parameters as JSON, cut where they are long."""
    return _cut(json.dumps(params, ensure_ascii=False, default=repr), _LONGEST_PARAMS)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
