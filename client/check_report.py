"""What `logitship check` found out about a processor, as records. The page for people: `check_page.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


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
        from .check_page import page

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
