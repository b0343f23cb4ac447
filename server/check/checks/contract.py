"""Checks of what a processor returns: `contract`, `finite` and `argmax`."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import ProcessorFault
from logitship.server.check.dry_run import DryRun, DryRunFacts
from logitship.server.check.findings import FAULT_ADVICE, not_checked, result
from logitship.server.check.replayed_calls import Recording

_ARGMAX_ADVICE = (
    "A server may skip an argmax-invariant processor for greedy requests, which would then get other tokens. Keep the "
    "most likely token the most likely one, or return False."
)


def check_contract(recordings: Sequence[Recording], facts: DryRunFacts | None, *, params_given: bool) -> CheckResult:
    """Check that each call returns a tensor of the right shape and dtype.

    Args:
        recordings: of all test cases, those that failed too.
        facts: of the dry run, or None.
        params_given: whether the author gave parameters, or the class has examples.
    """
    findings = [
        _fault_finding(recording, recording.fault, params_given=params_given)
        for recording in _with_distinct_faults(recordings)
        if recording.fault is not None and recording.fault.kind != "non_finite"
    ]
    if facts is not None and facts.edited_histories:
        findings.append(_history_finding(facts.edited_histories))
    if facts is not None and facts.dtype not in (None, torch.float32):
        findings.append(_dtype_finding(facts.dtype))
    calls = sum(len(recording.inputs) for recording in recordings)
    return result("contract", f"float32 [rows, vocabulary] in, the same out, in {calls} calls", findings)


def check_finite(recordings: Sequence[Recording]) -> CheckResult:
    """Check that there is no NaN and no +inf, and that a token can be sampled.

    A masked row may end without any token: the processor and the mask then allow different tokens, which is no error.
    """
    findings = []
    for recording in _with_distinct_faults(recordings):
        fault = recording.fault
        if fault is None or fault.kind != "non_finite":
            continue
        if recording.case.is_masked and "no token" in fault.message:
            continue
        seen = f"{_where(recording)} {fault.message.removeprefix('processor').strip()}"
        findings.append(Finding("finite", Severity.ERROR, seen, _finite_advice(recording, fault), _details(recording)))
    return result("finite", "random, masked and real logits: no NaN, no +inf, at least one token left", findings)


def check_argmax(dry_run: DryRun | None, recordings: Sequence[Recording]) -> CheckResult:
    """Check that a processor that declares `is_argmax_invariant` never changes the most likely token.

    Args:
        dry_run: has the instance to ask; None if it could not be made.
        recordings: of the test cases.
    """
    if dry_run is None:
        return not_checked("argmax", "the class could not be instantiated in this process")
    try:
        is_declared = _is_argmax_invariant(dry_run.processor)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # boundary: author code
        finding = Finding(
            "argmax",
            Severity.ERROR,
            f"is_argmax_invariant raises {type(error).__name__}: {error}",
            "Return True or False.",
            traceback="".join(traceback.format_exception(error)).rstrip(),
        )
        return result("argmax", "is_argmax_invariant fails", [finding])
    if not is_declared:
        return not_checked("argmax", "the class does not declare is_argmax_invariant")
    for recording in recordings:
        for step, (before, after) in enumerate(zip(recording.inputs, recording.outputs, strict=False)):
            most_likely = int(before.argmax())
            if after[most_likely] < after.max():
                now = int(after.argmax())
                seen = (
                    f"the class declares is_argmax_invariant, but in step {step + 1} of a sequence with "
                    f"{recording.case.name}, the most likely token was {most_likely} and is now {now}: the former has "
                    f"{float(after[most_likely]):.6g}, the latter {float(after[now]):.6g}"
                )
                facts = {"step": step, "before": most_likely, "after": now, "logits": recording.case.name}
                finding = Finding("argmax", Severity.ERROR, seen, _ARGMAX_ADVICE, facts)
                return result("argmax", "it changes the most likely token", [finding])
    return result("argmax", "the most likely token never changes, as declared")


def _is_argmax_invariant(processor: Any) -> bool:
    """Return what the processor declares, as a method (like vLLM's batch processors) or as an attribute."""
    declared = getattr(processor, "is_argmax_invariant", False)
    return bool(declared() if callable(declared) else declared)


def _with_distinct_faults(recordings: Sequence[Recording]) -> list[Recording]:
    """Return one recording per kind and message of fault: many sequences fail alike."""
    distinct: dict[tuple[str, str], Recording] = {}
    for recording in recordings:
        if recording.fault is not None:
            distinct.setdefault((recording.fault.kind, recording.fault.message), recording)
    return list(distinct.values())


def _fault_finding(recording: Recording, fault: ProcessorFault, *, params_given: bool) -> Finding:
    advice = FAULT_ADVICE.get(fault.kind, "")
    if fault.kind == "exception" and not params_given:
        advice = "No params were given. If the class needs some, give examples: --params JSON, or check([{…}])."
    return Finding(
        "contract",
        Severity.ERROR,
        f"{_where(recording)}: {fault.message}",
        advice,
        _details(recording),
        fault.traceback,
    )


def _where(recording: Recording) -> str:
    return f"step {recording.steps + 1} of a sequence with {recording.case.name}"


def _details(recording: Recording) -> dict[str, object]:
    fault = recording.fault
    assert fault is not None
    return {
        "fault": fault.kind,
        "message": fault.message,
        "step": recording.steps,
        "logits": recording.case.name,
        "params": dict(recording.case.params),
    }


def _finite_advice(recording: Recording, fault: ProcessorFault) -> str:
    if "NaN" in fault.message and recording.case.is_masked:
        return (
            "Logits may already be -inf: another processor or a mask sets them. -inf - -inf and 0 * -inf are NaN: "
            "compute with the finite ones, or with masked_fill and torch.where."
        )
    if "+inf" in fault.message:
        return "To force a token, forbid all others: set the row to -inf, and the token to 0."
    if "no token" in fault.message:
        return "Leave at least one token, such as an EOS token of __req__.eos_token_ids."
    return "Look for a division by zero, a logarithm of 0, or a sum of infinities."


def _history_finding(names: Sequence[str]) -> Finding:
    edited = " and ".join(f"__req__.{name}" for name in names)
    return Finding(
        "contract",
        Severity.ERROR,
        f"it changes {edited}, which later steps then read as the request's history",
        f"Read it only, or work on a copy: list({edited.partition(' ')[0]}). Keep your own values in __req__.state.",
        {"edited": list(names)},
    )


def _dtype_finding(dtype: torch.dtype | None) -> Finding:
    name = str(dtype).removeprefix("torch.")
    cost = "costs a conversion" if dtype is torch.float64 else "loses precision"
    return Finding(
        "contract",
        Severity.WARNING,
        f"it returns {name}, which is converted to float32 and {cost}",
        "Keep the logits' dtype: give new tensors dtype=logits.dtype.",
        {"dtype": name},
    )
