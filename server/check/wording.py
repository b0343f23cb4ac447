"""What was seen, in words and in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitship.client.check_report import shown_params

from .recording import Recording
from .replay import Mismatch


def describe(recordings: Sequence[Recording], found: Mismatch) -> str:
    """A sentence about a row that differs."""
    trial = recordings[found.recording].trial
    where = f"step {found.step + 1} of a sequence with {trial.name}"
    if found.fault is not None:
        return f"{where} fails: {found.fault.message}"
    others = f" ({found.count:,} logits differ)" if found.count > 1 else ""
    return f"{where}: token {found.token} has {found.got:.6g}, expected {found.expected:.6g}{others}"


def rows_of(recordings: Sequence[Recording], found: Mismatch) -> str:
    """The rows of a call, one a line."""
    lines = []
    for place, (number, step) in enumerate(found.call):
        mark = "  ← this one" if place == found.place and not found.row_by_row else ""
        trial = recordings[number].trial
        lines.append(f"  row {place}: params {shown_params(trial.params)}, {step} output tokens{mark}")
    return "\n".join(lines)


def details(recordings: Sequence[Recording], found: Mismatch) -> dict[str, Any]:
    """The same for programs."""
    facts: dict[str, Any] = {
        "rows": [{"params": dict(recordings[number].trial.params), "step": step} for number, step in found.call],
        "row": found.place,
        "step": found.step,
        "logits": recordings[found.recording].trial.name,
    }
    if found.fault is not None:
        return facts | {"fault": found.fault.kind, "message": found.fault.message}
    if found.row_by_row:
        return facts | {"failed_together": True}
    return facts | {"token": found.token, "expected": found.expected, "got": found.got, "differing": found.count}
