"""The report of `logitship check`: records, and the same as a page of text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

WIDTH = 100
_LONGEST_PARAMS = 72
_INDENT = 4


class Severity(Enum):
    """How bad a finding is.

    An ERROR is a broken promise: requests would fail, or get other tokens than they should. A WARNING costs time or
    portability. A NOTE is good to know.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Verdict(Enum):
    """Of a check. NOT_CHECKED: something that was found before leaves nothing to find out, or there is no claim."""

    PASSED = "passed"
    WARNED = "warned"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """Something to mend, or to know.

    Attributes:
        check: name of the check that found it.
        seen: what was seen: the smallest example of it.
        advice: how to mend it; "" where there is nothing to say.
        details: the same for programs: row, token, expected, got, and the like.
        traceback: of the author's code, or "".
    """

    check: str
    severity: Severity
    seen: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


@dataclass(frozen=True)
class CheckResult:
    """What one check came to.

    Attributes:
        summary: a line: what was looked at, or why nothing was.
    """

    name: str
    verdict: Verdict
    summary: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class BatchTiming:
    """What a call costs with so many rows. Medians, in microseconds a row.

    Attributes:
        total: of the call as the server makes it, with the way into the sandbox and back.
        own: of the author's code alone, measured in the author's process; None if it cannot run there.
    """

    rows: int
    total: float
    own: float | None


@dataclass(frozen=True)
class SlowLine:
    """A line of the author's code that takes a large part of the time.

    Attributes:
        file: as the code names it.
        share: of the time spent in the author's code, 0 to 1.
        microseconds: a row.
    """

    file: str
    line: int
    text: str
    share: float
    microseconds: float


@dataclass(frozen=True, repr=False)
class CheckReport:
    """All that was found out. `str()` and `repr()` of it are a page of text.

    Attributes:
        target: what was checked, as it was named.
        name: of the class.
        digest: its identity, `sha256:…`; "" if it does not travel.
        model: on which it was checked.
        vocab_size: columns of its logits; 0 if nothing ran.
        isolation: where it ran: `sandbox`, or `none` for this process.
        versions: of logitship, Python and torch.
        params: the parameters that the rows had, in turn.
        num_given_params: how many of them the author gave. The others were made of these.
        checks: in the order in which they were made.
        timings: by batch size; empty where it was not measured.
        slow_lines: the slowest first, at most two.
        ignored: names of the checks whose findings do not count.
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

    @property
    def findings(self) -> list[Finding]:
        """Of all checks that are not ignored."""
        return [finding for check in self.checks if check.name not in self.ignored for finding in check.findings]

    @property
    def ok(self) -> bool:
        """True if there is no error among the findings. Warnings and notes are none."""
        return not self.count(Severity.ERROR)

    def count(self, severity: Severity) -> int:
        """How many findings are of a severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def __getitem__(self, name: str) -> CheckResult:
        """The check of a name.

        Raises:
            KeyError: there is none.
        """
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check is named {name!r}; there are: {', '.join(check.name for check in self.checks)}")

    def to_dict(self) -> dict[str, Any]:
        """The whole report in values that JSON has."""
        counts = {severity.value: self.count(severity) for severity in Severity}
        report: dict[str, Any] = _plain(asdict(self))
        return {"ok": self.ok, "counts": counts, **report}

    def __str__(self) -> str:
        return page(self)

    __repr__ = __str__


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case frozenset() | set():
            return sorted(_plain(item) for item in value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not -float("inf") < value < float("inf"):
            return str(value)
    return value


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
