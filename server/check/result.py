"""From findings to a check's verdict."""

from __future__ import annotations

from collections.abc import Sequence

from logitship.client.check_report import CheckResult, Finding, Severity, Verdict


def result(name: str, summary: str, findings: Sequence[Finding] = ()) -> CheckResult:
    """What a check came to that was made."""
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        verdict = Verdict.FAILED
    else:
        verdict = Verdict.WARNED if Severity.WARNING in severities else Verdict.PASSED
    return CheckResult(name, verdict, summary, tuple(findings))


def not_checked(name: str, reason: str) -> CheckResult:
    """A check that could find nothing out."""
    return CheckResult(name, Verdict.NOT_CHECKED, reason)
