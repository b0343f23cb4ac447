"""Is a row of a batch what it is alone?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from logitship.client.check_report import CheckResult, Finding, Severity
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.bench import Bench
from logitship.server.check.dry_run import Facts
from logitship.server.check.recording import Recording
from logitship.server.check.replay import Mismatch, replay, together
from logitship.server.check.result import result
from logitship.server.check.wording import describe, details, rows_of

_ADVICE = (
    "custom_param_list[row] belongs to logits[row], and rows come, go and change places from step to step. Take each "
    "row's own parameters and history, and keep nothing by row number."
)

_LONGEST_ERROR = 160
"""Characters."""


def check_rows(
    bench: Bench, string: PickledProcessor, recordings: Sequence[Recording], facts: Facts | None
) -> CheckResult:
    """Compare batches, in several orders, with their rows one by one."""
    for order in _orders(len(recordings)):
        with bench.stage(string) as stage:
            found = replay(stage, recordings, together(recordings, order))
        if found is not None:
            found = _smaller(bench, string, recordings, found) or found
            return result("rows", "a row depends on its company", [_finding(recordings, found, facts)])
    return result("rows", f"batches of up to {len(recordings)}, in any order, equal their rows one by one")


def _orders(count: int) -> Iterator[list[int]]:
    """As they come, the other way round, and shuffled so that each has other neighbours."""
    order = list(range(count))
    yield order
    if count > 1:
        yield order[::-1]
        yield order[1::2] + order[::2]


def _smaller(
    bench: Bench, string: PickledProcessor, recordings: Sequence[Recording], found: Mismatch
) -> Mismatch | None:
    """The same with two rows, if two are enough. Those of the call that was found are tried first with its row."""
    numbers = [number for number, _ in found.call]
    if len(numbers) == 2:
        return None
    pairs = sorted(permutations(sorted(numbers), 2), key=lambda pair: found.recording not in pair)
    for pair in pairs[:12]:
        with bench.stage(string) as stage:
            smaller = replay(stage, recordings, together(recordings, pair))
        if smaller is not None and len(smaller.call) == 2:
            return smaller
    return None


def _shortened(text: str) -> str:
    """Assertions like to show all parameters of all rows."""
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}…"


def _finding(recordings: Sequence[Recording], found: Mismatch, facts: Facts | None) -> Finding:
    error = facts.error if facts is not None else None
    traceback = ""
    if found.row_by_row or found.fault is not None:
        reason = _shortened(error.text) if error is not None else found.fault.message if found.fault else "it fails"
        seen = f"{len(found.call)} rows that it takes alone, it does not take together: {reason}"
        traceback = error.traceback if error is not None else ""
    else:
        seen = f"in a batch of {len(found.call)}, {describe(recordings, found)}"
    seen = f"{seen}\n{rows_of(recordings, found)}"
    return Finding("rows", Severity.ERROR, seen, _ADVICE, details(recordings, found), traceback)
