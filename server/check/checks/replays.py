"""Checks that replay recorded sequences: `deterministic`, `state` and `rows`.

They run in this order: each assumes that the ones before it passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.errors import ProcessorFault
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.dry_run import DryRunFacts
from logitship.server.check.environment import CheckEnvironment, FreshProcessor
from logitship.server.check.findings import describe, details, is_killed, killed_result, list_rows, result
from logitship.server.check.replayed_calls import (
    Mismatch,
    Recording,
    batched,
    interleaved,
    one_by_one,
    replay,
    replay_call,
)

_DETERMINISM_ADVICE = (
    "Random numbers, the clock, id() and hash() of text differ from process to process. Sample from a torch.Generator "
    "that is seeded with the history, or with a seed from the params."
)
_STATE_ADVICE = (
    "Keep what belongs to one sequence in custom_param_list[row]['__req__'].state, which is copied when the sequence "
    "forks. `self` and the module are shared by all sequences and end with the sandbox: keep only tables there."
)
_ROWS_ADVICE = (
    "custom_param_list[row] belongs to logits[row], and rows are added, removed and moved from step to step. Use each "
    "row's own parameters and history, and keep nothing by row number."
)
_MAX_ERROR_CHARS = 160


def check_determinism(
    environment: CheckEnvironment, string: PickledProcessor, recordings: Sequence[Recording]
) -> CheckResult:
    """Replay each sequence in a sandbox of its own."""
    for number in range(len(recordings)):
        with environment.fresh_processor(string) as processor:
            mismatch = replay(processor, recordings, one_by_one(recordings, [number]))
        if mismatch is not None and is_killed(mismatch.fault):
            return killed_result("deterministic", "the same sequence again, in a new sandbox", recordings, mismatch)
        if mismatch is not None:
            seen = f"the same sequence, run twice in new sandboxes: {describe(recordings, mismatch)}"
            finding = Finding("deterministic", Severity.ERROR, seen, _DETERMINISM_ADVICE, details(recordings, mismatch))
            return result("deterministic", "the same history gives different logits", [finding])
    return result("deterministic", "the same history gives the same logits, in any sandbox")


def check_state(
    environment: CheckEnvironment,
    string: PickledProcessor,
    recordings: Sequence[Recording],
    facts: DryRunFacts | None,
) -> CheckResult:
    """Replay the sequences after each other, in turns, and forked."""
    numbers = range(len(recordings))
    replays: tuple[tuple[str, Callable[[FreshProcessor], Mismatch | None]], ...] = (
        (
            "after other sequences in the same sandbox",
            lambda processor: replay(processor, recordings, one_by_one(recordings, numbers)),
        ),
        (
            "in turns with other sequences, a call for each",
            lambda processor: replay(processor, recordings, interleaved(recordings, numbers)),
        ),
        ("forked, as for n > 1 and beam search", lambda processor: _replay_forked(processor, recordings)),
    )
    for situation, run in replays:
        with environment.fresh_processor(string) as processor:
            mismatch = run(processor)
        if mismatch is not None and is_killed(mismatch.fault):
            return killed_result("state", situation, recordings, mismatch)
        if mismatch is not None:
            seen = f"{situation}: {describe(recordings, mismatch)}{_changed(facts)}"
            traceback = mismatch.fault.traceback if mismatch.fault is not None else ""
            finding = Finding("state", Severity.ERROR, seen, _STATE_ADVICE, details(recordings, mismatch), traceback)
            return result("state", "a sequence depends on other sequences", [finding])
    findings = [_unrestorable_state()] if facts is not None and facts.has_unrestorable_state else []
    return result("state", "same logits after, between and forked from other sequences", findings)


def _changed(facts: DryRunFacts | None) -> str:
    if facts is None or not facts.changed:
        return ""
    return f". Changed from call to call: {', '.join(facts.changed[:5])}"


def _unrestorable_state() -> Finding:
    return Finding(
        "state",
        Severity.NOTE,
        "__req__.state or the params hold values other than plain data, or more than 4 KiB of it. If a call for "
        "several rows fails because of another row, this sequence ends too, because its state cannot be restored",
    )


def _replay_forked(processor: FreshProcessor, recordings: Sequence[Recording]) -> Mismatch | None:
    """Fork each sequence at half its length, and replay the rest in both."""
    for number, recording in enumerate(recordings):
        case, middle = recording.case, recording.steps // 2
        sequences = [processor.start_sequence(case.rid, case.params, case.prompt_token_ids)]
        for step in range(recording.steps):
            if step == middle and middle:
                try:
                    sequences.append(sequences[0].fork())
                except ProcessorFault as fault:
                    return Mismatch([(number, step)], 0, fault=fault)
            for sequence in sequences:
                mismatch = replay_call(processor, recordings, [(number, step)], [sequence])
                if mismatch is not None:
                    return mismatch
        for sequence in sequences:
            sequence.row.close()
    return None


def check_rows(
    environment: CheckEnvironment,
    string: PickledProcessor,
    recordings: Sequence[Recording],
    facts: DryRunFacts | None,
) -> CheckResult:
    """Replay the sequences as batches, in several row orders."""
    for order, at_once in _batches(len(recordings)):
        with environment.fresh_processor(string) as processor:
            mismatch = replay(processor, recordings, batched(recordings, order, at_once=at_once))
        if mismatch is not None and is_killed(mismatch.fault):
            return killed_result("rows", f"{len(mismatch.call)} rows in one batch", recordings, mismatch)
        if mismatch is not None:
            mismatch = _reduce(environment, string, recordings, mismatch, at_once) or mismatch
            return result(
                "rows", "a row depends on the other rows of its batch", [_rows_finding(recordings, mismatch, facts)]
            )
    return result("rows", f"batches of up to {len(recordings)} rows, in several orders, match single rows")


def _batches(count: int) -> Iterator[tuple[list[int], bool]]:
    """Yield row orders, and whether all rows begin at once.

    The orders are the given one, the reverse, and one that gives each row other neighbors.
    """
    order = list(range(count))
    yield order, False
    if count > 1:
        yield order[::-1], True
        yield order[1::2] + order[::2], False


def _reduce(
    environment: CheckEnvironment,
    string: PickledProcessor,
    recordings: Sequence[Recording],
    mismatch: Mismatch,
    at_once: bool,
) -> Mismatch | None:
    """Look for a mismatch with only two rows, trying pairs with the mismatched row first."""
    numbers = [number for number, _ in mismatch.call]
    if len(numbers) == 2:
        return None
    pairs = sorted(permutations(sorted(numbers), 2), key=lambda pair: mismatch.recording not in pair)
    for pair in pairs[:12]:
        with environment.fresh_processor(string) as processor:
            smaller = replay(processor, recordings, batched(recordings, pair, at_once=at_once))
        if smaller is not None and len(smaller.call) == 2:
            return smaller
    return None


def _shorten(text: str) -> str:
    """Truncate an error text: assertions often contain the parameters of all rows."""
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"


def _rows_finding(recordings: Sequence[Recording], mismatch: Mismatch, facts: DryRunFacts | None) -> Finding:
    traceback = ""
    if mismatch.row_by_row or mismatch.fault is not None:
        reason = mismatch.fault.message if mismatch.fault else "it fails"
        if facts is not None and facts.error:
            reason, traceback = _shorten(facts.error), facts.traceback
        seen = f"{len(mismatch.call)} rows that work one by one fail in one batch: {reason}"
    else:
        seen = f"in a batch of {len(mismatch.call)}, {describe(recordings, mismatch)}"
    seen = f"{seen}\n{list_rows(recordings, mismatch)}"
    return Finding("rows", Severity.ERROR, seen, _ROWS_ADVICE, details(recordings, mismatch), traceback)
