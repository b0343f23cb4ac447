"""Check results, and the text of their findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitship.client.check_report import CheckResult, Finding, Severity, Verdict, shown_params
from logitship.client.errors import ProcessorFault

from .replayed_calls import Mismatch, Recording

KILLED = frozenset({"deadline", "crash", "cpu_time", "protocol", "load"})
"""Kinds of faults that end a sandbox."""

FAULT_ADVICE = {
    "bad_result": "Return `logits`, edited in place, or a new floating-point tensor of its shape and device.",
    "deadline": (
        "A step may take at most --sandbox-step-timeout. Make tables in prepare(self, tokenizer, vocab_size), which "
        "may take --sandbox-load-timeout, or over several steps; import at the top of the module."
    ),
    "crash": "Its process ended. Watch the memory (--sandbox-memory), and do not exit the process.",
    "cpu_time": "It computes between its calls: it must not start threads or timers.",
}
"""Advice for the author, by kind of the fault."""

_ALL_ROWS = "A server calls the processor once for all rows that use it: work on all rows at once."
_KILLED_SUMMARIES = {"deadline": "a call takes too long", "cpu_time": "it computes between its calls"}


def result(name: str, summary: str, findings: Sequence[Finding] = ()) -> CheckResult:
    """Return the result of a check, with the verdict of its most severe finding."""
    severities = {finding.severity for finding in findings}
    if Severity.ERROR in severities:
        verdict = Verdict.FAILED
    else:
        verdict = Verdict.WARNED if Severity.WARNING in severities else Verdict.PASSED
    return CheckResult(name, verdict, summary, tuple(findings))


def not_checked(name: str, reason: str) -> CheckResult:
    """Return the result of a check that was skipped."""
    return CheckResult(name, Verdict.NOT_CHECKED, reason)


def is_killed(fault: ProcessorFault | None) -> bool:
    """Return whether a fault ended the sandbox: it says nothing about the processor's logits."""
    return fault is not None and fault.kind in KILLED


def killed_result(name: str, situation: str, recordings: Sequence[Recording], mismatch: Mismatch) -> CheckResult:
    """Return the result of a check whose sandbox was killed before logits could be compared.

    Args:
        name: name of the check.
        situation: what was tried.
        recordings: the recordings that were replayed.
        mismatch: the row with the fault.
    """
    fault = mismatch.fault
    assert fault is not None
    finding = Finding(
        name,
        Severity.ERROR,
        f"{situation}: {describe(recordings, mismatch)}",
        advice_for(fault, len(mismatch.call)),
        details(recordings, mismatch),
        fault.traceback,
    )
    summary = _KILLED_SUMMARIES.get(fault.kind, "its process ended")
    return result(name, f"{summary}, so no logits could be compared", [finding])


def advice_for(fault: ProcessorFault, rows: int) -> str:
    """Return the advice for the author after a call with this many rows failed; "" if there is none."""
    return _ALL_ROWS if rows > 1 and fault.kind == "deadline" else FAULT_ADVICE.get(fault.kind, "")


def describe(recordings: Sequence[Recording], mismatch: Mismatch) -> str:
    """Describe a row that differs, in one sentence."""
    case = recordings[mismatch.recording].case
    where = f"step {mismatch.step + 1} of a sequence with {case.name}"
    if mismatch.fault is not None:
        return f"{where} fails: {mismatch.fault.message}"
    others = f" ({mismatch.count:,} logits differ)" if mismatch.count > 1 else ""
    return f"{where}: token {mismatch.token} has {mismatch.got:.6g}, expected {mismatch.expected:.6g}{others}"


def list_rows(recordings: Sequence[Recording], mismatch: Mismatch) -> str:
    """List the rows of the failed call, one per line."""
    lines = []
    for row, (number, step) in enumerate(mismatch.call):
        mark = "  ← this one" if row == mismatch.row and not mismatch.row_by_row else ""
        params = shown_params(recordings[number].case.params)
        lines.append(f"  row {row}: params {params}, {step} output tokens{mark}")
    return "\n".join(lines)


def details(recordings: Sequence[Recording], mismatch: Mismatch) -> dict[str, Any]:
    """Return the same facts for programs: the finding's `details`."""
    facts: dict[str, Any] = {
        "rows": [{"params": dict(recordings[number].case.params), "step": step} for number, step in mismatch.call],
        "row": mismatch.row,
        "step": mismatch.step,
        "logits": recordings[mismatch.recording].case.name,
    }
    if mismatch.fault is not None:
        return facts | {"fault": mismatch.fault.kind, "message": mismatch.fault.message}
    if mismatch.row_by_row:
        return facts | {"failed_together": True}
    return facts | {
        "token": mismatch.token,
        "expected": mismatch.expected,
        "got": mismatch.got,
        "differing": mismatch.count,
    }
