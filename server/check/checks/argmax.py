"""Does it leave the most likely token alone, if it says so?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.server.check.dry_run import DryRun
from logitship.server.check.recording import Recording
from logitship.server.check.result import not_checked, result

_ADVICE = (
    "A server may skip an argmax-invariant processor for greedy requests, which would then get other tokens. Keep the "
    "most likely token the most likely one, or return False."
)


def check_argmax(rehearsal: DryRun | None, recordings: Sequence[Recording]) -> CheckResult:
    """Look for a step in which another token became the most likely one.

    Args:
        rehearsal: has an instance, which is asked whether it says so.
    """
    if rehearsal is None:
        return not_checked("argmax", "it could not be asked")
    if not _claims(rehearsal.processor):
        return not_checked("argmax", "it does not say that it is argmax-invariant (is_argmax_invariant)")
    for recording in recordings:
        for step, (before, after) in enumerate(zip(recording.inputs, recording.outputs, strict=False)):
            most_likely = int(before.argmax())
            if after[most_likely] < after.max():
                now = int(after.argmax())
                seen = (
                    f"it says that it is argmax-invariant, but in step {step + 1} of a sequence with "
                    f"{recording.trial.name}, the most likely token was {most_likely} and is {now}: the former has "
                    f"{float(after[most_likely]):.6g}, the latter {float(after[now]):.6g}"
                )
                facts = {"step": step, "before": most_likely, "after": now, "logits": recording.trial.name}
                finding = Finding("argmax", Severity.ERROR, seen, _ADVICE, facts)
                return result("argmax", "it changes the most likely token", [finding])
    return result("argmax", "as it says, the most likely token stays the most likely one")


def _claims(processor: Any) -> bool:
    """vLLM's batch processors say it with a method; an attribute will do."""
    claim = getattr(processor, "is_argmax_invariant", False)
    return bool(claim() if callable(claim) else claim)
