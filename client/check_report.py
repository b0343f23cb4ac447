"""The report of `logitship check`: records, and the same as a page of text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

WIDTH = 100
_MAX_PARAMS = 72
_INDENT = 4
_MAX_LINES_PRINTED = 20

MAX_PRINTED = 1 << 14
"""Most characters of what the processor printed in a report."""


class Severity(Enum):
    """Severity of a finding.

    An ERROR breaks the contract: requests would fail or get wrong tokens. A WARNING costs time or portability. A NOTE
    is good to know.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Verdict(Enum):
    """Result of a check. NOT_CHECKED: an earlier finding makes it pointless, or the class makes no claim to check."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """A problem to fix, or something to know.

    Attributes:
        check: name of the check that found it.
        seen: observation: the smallest example of the problem.
        advice: how to fix it, or "".
        details: the observation for programs: row, token, expected, got, and the like.
        traceback: traceback of the author's code, or "".
    """

    check: str
    severity: Severity
    seen: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        summary: one line: what was checked, or why it was not checked.
    """

    name: str
    verdict: Verdict
    summary: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class BatchTiming:
    """Time of a call with this number of rows. Medians, in microseconds per row.

    Attributes:
        total: time of the server's call, including the round trip to the sandbox.
        own: time of the author's code alone, measured in the author's process; None if it cannot run there.
    """

    rows: int
    total: float
    own: float | None


@dataclass(frozen=True)
class SlowLine:
    """A line of the author's code that takes a large part of the time.

    Attributes:
        file: file name in the code object.
        share: share of the time spent in the author's code, 0 to 1.
        microseconds: microseconds per row.
    """

    file: str
    line: int
    text: str
    share: float
    microseconds: float


@dataclass(frozen=True, repr=False)
class CheckReport:
    """Report of `logitship check`. `str()` and `repr()` of it are a page of text.

    Attributes:
        target: the checked class, as given on the command line.
        name: name of the class.
        digest: its identity, `sha256:…`; "" if it cannot be serialized.
        model: the model that it was checked on.
        vocab_size: columns of its logits; 0 if nothing ran.
        isolation: where it ran: `sandbox`, or `none` for this process.
        versions: versions of logitship, Python and torch.
        params: the parameters that the rows cycled through.
        num_given_params: how many of them the author gave. The others were derived from these.
        checks: the checks in the order in which they ran.
        timings: timings by batch size; empty if not measured.
        slow_lines: the slowest lines, slowest first, at most two.
        ignored: names of the checks whose findings do not count.
        printed: the last of what it printed for a prompt, in a sandbox.
    """

    target: str
    name: str
    digest: str
    model: str
    vocab_size: int
    isolation: str
    versions: Mapping[str, str]
    params: Sequence[Mapping[str, Any]]
    num_given_params: int
    checks: Sequence[CheckResult]
    timings: Sequence[BatchTiming] = ()
    slow_lines: Sequence[SlowLine] = ()
    ignored: frozenset[str] = frozenset()
    printed: str = ""

    @property
    def findings(self) -> list[Finding]:
        """Findings of all checks that are not ignored."""
        return [finding for check in self.checks if check.name not in self.ignored for finding in check.findings]

    @property
    def ok(self) -> bool:
        """True if the findings contain no error; they may contain warnings and notes."""
        return not self.count(Severity.ERROR)

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def __getitem__(self, name: str) -> CheckResult:
        """Return the check with this name.

        Raises:
            KeyError: there is none.
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check is named {name!r}; there are: {', '.join(check.name for check in self.checks)}")

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to values that JSON has."""
        counts = {severity.value: self.count(severity) for severity in Severity}
        report: dict[str, Any] = _plain(self)
        return {"ok": self.ok, "counts": counts, **report}

    def __str__(self) -> str:
        return page(self)

    __repr__ = __str__


def _plain(value: Any) -> Any:
    """Convert a value to those that JSON has: what the author wrote into `params_schema` may be any object."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    match value:
        case Enum():
            return value.value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case frozenset() | set():
            return sorted((_plain(item) for item in value), key=str)
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not -float("inf") < value < float("inf"):
            return str(value)
        case str() | int() | float() | None:
            return value
    return repr(value)


_SIGNS = {Verdict.PASSED: "✓", Verdict.WARNED: "!", Verdict.FAILED: "✗", Verdict.NOT_CHECKED: "-"}
_ASCII = str.maketrans({"✓": "+", "✗": "x", "…": "...", "µ": "u", "←": "<-"})


def page(report: CheckReport, *, ascii_only: bool = False) -> str:
    """Return the report as text, without a final newline.

    Args:
        report: the report.
        ascii_only: whether to use ASCII only, for terminals without Unicode.
    """
    lines = [*_head(report), ""]
    names = max(len(check.name) for check in report.checks)
    for check in report.checks:
        lines.append(_line(check, names, ignored=check.name in report.ignored))
        if check.name == "speed" and report.timings:
            lines += _speed(report)
        for finding in check.findings:
            lines += _finding(finding)
    lines += [*_printed(report.printed), "", _verdict(report)]
    text = "\n".join(lines)
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode() if ascii_only else text


def _head(report: CheckReport) -> Iterator[str]:
    yield f"{report.name}  {report.digest[:26]}{'…' if report.digest else '(cannot be serialized)'}"
    if report.vocab_size:
        where = "in a sandbox" if report.isolation == "sandbox" else "in this process, without a sandbox"
        yield f"on {report.model}, {report.vocab_size:,} tokens, {where}"
    for number, params in enumerate(report.params):
        derived = ", derived from it to tell rows apart" if number >= report.num_given_params else ""
        yield f"{'params' if number == 0 else '   and'} {shown_params(params)}{derived}"


def _line(check: CheckResult, width: int, *, ignored: bool) -> str:
    return f"{_SIGNS[check.verdict]} {check.name:<{width}}  {check.summary}{' (ignored)' if ignored else ''}"


def _finding(finding: Finding) -> Iterator[str]:
    label = f"{finding.severity.value}: "
    yield from _wrapped(label + finding.seen)
    if finding.traceback:
        yield from (_cut(" " * (_INDENT + 2) + line, WIDTH) for line in finding.traceback.rstrip().splitlines())
    if finding.advice:
        yield from _wrapped(("hint: " if finding.severity is Severity.NOTE else "fix: ") + finding.advice)


def _wrapped(text: str) -> Iterator[str]:
    """Wrap paragraphs with a hanging indent. Indented lines are code and are not wrapped."""
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
    yield f"{margin}{'rows':>6}{'µs/row':>12}{'your code':>14}{'ms/step':>12}"
    for timing in report.timings:
        yield margin + _timing(timing)
    if report.slow_lines:
        yield f"{margin}slowest lines:"
        locations = [f"{_short(line.file)}:{line.line}" for line in report.slow_lines]
        widest = max(map(len, locations))
        for location, line in zip(locations, report.slow_lines, strict=True):
            yield f"{margin}  {_slow_line(location.ljust(widest), line)}"


def _printed(text: str) -> Iterator[str]:
    if not text:
        return
    lines = text.splitlines()
    yield ""
    yield f"printed for a prompt{', the last lines' if len(lines) > _MAX_LINES_PRINTED else ''}:"
    yield from (_cut(" " * _INDENT + line, WIDTH) for line in lines[-_MAX_LINES_PRINTED:])


def _timing(timing: BatchTiming) -> str:
    own = "-" if timing.own is None else f"{timing.own:,.1f}"
    return f"{timing.rows:>6}{timing.total:>12,.1f}{own:>14}{timing.total * timing.rows / 1e3:>12.2f}"


def _slow_line(location: str, line: SlowLine) -> str:
    width = WIDTH - _INDENT - len(location) - 20
    return f"{location} {line.share:>4.0%} {line.microseconds:>8.1f} µs  {_cut(line.text, width)}"


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
    """Return the parameters as JSON, truncated if they are long."""
    return _cut(json.dumps(params, ensure_ascii=False, default=repr), _MAX_PARAMS)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
