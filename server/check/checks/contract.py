"""Does it answer, with logits that a token can be drawn from?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import ProcessorFault
from logitship.server.check.dry_run import Facts
from logitship.server.check.recording import Recording
from logitship.server.check.result import result

_ADVICE = {
    "bad_result": "Return `logits`, edited in place, or a new floating-point tensor of its shape and device.",
    "deadline": (
        "A step may take as long as --sandbox-step-timeout says. Make tables in __init__, which has "
        "--sandbox-load-timeout, or over several steps; import at the top of the module."
    ),
    "crash": "Its process ended. Mind the memory (--sandbox-memory), and do not end the process.",
    "cpu_time": "It computes between its calls: threads and timers of its own are not allowed.",
}


def check_contract(recordings: Sequence[Recording], facts: Facts | None, *, params_given: bool) -> CheckResult:
    """Does each call give a tensor of the right shape and type?

    Args:
        facts: of the rehearsal, if there was one.
        params_given: the author said which parameters to try.
    """
    findings = [
        _fault_finding(recording, recording.fault, params_given=params_given)
        for recording in _with_distinct_faults(recordings)
        if recording.fault is not None and recording.fault.kind != "non_finite"
    ]
    if facts is not None and facts.dtype not in (None, torch.float32):
        findings.append(_dtype_finding(facts.dtype))
    calls = sum(len(recording.inputs) for recording in recordings)
    return result("contract", f"float32 [rows, vocabulary] in, the same out, in {calls} calls", findings)


def check_finite(recordings: Sequence[Recording]) -> CheckResult:
    """Is there no NaN and no +inf, and a token left to draw?

    A row of which a mask left few tokens may end with none: the processor and the mask then want different things.
    """
    findings = []
    for recording in _with_distinct_faults(recordings):
        fault = recording.fault
        if fault is None or fault.kind != "non_finite":
            continue
        if recording.trial.is_masked and "no token" in fault.message:
            continue
        seen = f"{_where(recording)} {fault.message.removeprefix('processor').strip()}"
        findings.append(Finding("finite", Severity.ERROR, seen, _finite_advice(recording, fault), _details(recording)))
    return result("finite", "random, masked and real logits: no NaN, no +inf, a token left to draw", findings)


def _with_distinct_faults(recordings: Sequence[Recording]) -> list[Recording]:
    """One for each way to fail: many sequences fail alike."""
    distinct: dict[tuple[str, str], Recording] = {}
    for recording in recordings:
        if recording.fault is not None:
            distinct.setdefault((recording.fault.kind, recording.fault.message), recording)
    return list(distinct.values())


def _fault_finding(recording: Recording, fault: ProcessorFault, *, params_given: bool) -> Finding:
    advice = _ADVICE.get(fault.kind, "")
    if fault.kind == "exception" and not params_given:
        advice = "No params were given. If it needs some, give examples: --params JSON, or check([{…}])."
    return Finding(
        "contract",
        Severity.ERROR,
        f"{_where(recording)}: {fault.message}",
        advice,
        _details(recording),
        fault.traceback,
    )


def _where(recording: Recording) -> str:
    return f"step {recording.steps + 1} of a sequence with {recording.trial.name}"


def _details(recording: Recording) -> dict[str, object]:
    fault = recording.fault
    assert fault is not None
    return {
        "fault": fault.kind,
        "message": fault.message,
        "step": recording.steps,
        "logits": recording.trial.name,
        "params": dict(recording.trial.params),
    }


def _finite_advice(recording: Recording, fault: ProcessorFault) -> str:
    if "NaN" in fault.message and recording.trial.is_masked:
        return (
            "Logits may be -inf before you: another processor, or a mask. -inf - -inf and 0 * -inf are NaN: compute "
            "with the finite ones, or with masked_fill and torch.where."
        )
    if "+inf" in fault.message:
        return "To force a token, forbid all others: set the row to -inf, and the token to 0."
    if "no token" in fault.message:
        return "Leave at least one token, such as an end token of __req__.eos_token_ids."
    return "Look for a division by zero, a logarithm of 0, or a sum of infinities."


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
