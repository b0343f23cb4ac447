"""What does a call cost?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from logitship.client.check_report import BatchTiming, CheckResult, Finding, Severity, SlowLine
from logitship.client.errors import ProcessorFault
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.bench import Bench, Stage
from logitship.server.check.dry_run import DryRun
from logitship.server.check.line_times import measure_lines
from logitship.server.check.own_time import FEWEST_CALLS, MOST_CALLS, SECONDS, WARM_UP, own_seconds
from logitship.server.check.recording import Recording
from logitship.server.check.result import result
from logitship.server.check.row_loops import RowLoop, find_row_loops

SLOW_ROW = 200.0
"""Microseconds a row, of the author's own code. 64 rows then take 13 ms, half a step of a small model."""
COSTLY_LOOP = 20.0
"""Microseconds a row, from which on a loop over rows is worth a word of warning."""
_FEW_ROWS = 8
"""Of the calls that are looked at more closely."""
_ONE_BY_ONE = "it raises for these rows together, and for none of them alone"
_HISTORY_LENGTHS = (32, 2048)
"""Output tokens."""
_COSTLY_HISTORY = 50.0
"""Microseconds a row."""


@dataclass(frozen=True)
class Measured:
    """The check, and what stands below it."""

    result: CheckResult
    timings: list[BatchTiming]
    slow_lines: list[SlowLine]


def check_speed(
    bench: Bench,
    string: PickledProcessor,
    cls: type[CustomLogitProcessor],
    recordings: Sequence[Recording],
    rehearsal: DryRun | None,
    batch_sizes: Sequence[int],
) -> Measured:
    """Time calls in the sandbox, and lines in this process."""
    base = torch.randn(max(batch_sizes), bench.model.vocab_size, generator=torch.Generator().manual_seed(0))
    timings: list[BatchTiming] = []
    findings: list[Finding] = []
    with bench.stage(string) as stage:
        for rows in sorted(set(batch_sizes)):
            try:
                total = _median_call(stage, recordings, base[:rows])
            except ProcessorFault as fault:
                findings.append(_too_slow(rows, fault))
                break
            own = None if rehearsal is None else own_seconds(rehearsal, recordings, base[:rows])
            timings.append(BatchTiming(rows, _per_row(total, rows), None if own is None else _per_row(own, rows)))
    lines: list[SlowLine] = []
    if rehearsal is not None and not findings:  # what does not work in a sandbox might hang here, or end this process
        findings += _history_findings(rehearsal, recordings, base[:_FEW_ROWS])
        lines = measure_lines(cls, rehearsal, recordings, base[:_FEW_ROWS])
    findings += _verdicts(timings, find_row_loops(cls))
    return Measured(result("speed", _summary(timings), findings), timings, lines)


def _per_row(seconds: float, rows: int) -> float:
    """Microseconds."""
    return round(seconds / rows * 1e6, 2)


def _median_call(stage: Stage, recordings: Sequence[Recording], logits: torch.Tensor) -> float:
    """Seconds of a call as a server makes it. Each sequence takes the most likely token after each.

    Raises:
        ProcessorFault: a call fails.
    """
    trials = [recordings[row % len(recordings)].trial for row in range(len(logits))]
    players = [stage.enter(f"{each.rid}-{row}", each.params, each.prompt_token_ids) for row, each in enumerate(trials)]
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < FEWEST_CALLS or (time.perf_counter() - began < SECONDS and len(seconds) < MOST_CALLS):
        called = stage.call(players, logits)
        if called.faults:
            raise called.faults[min(called.faults)]
        if called.row_by_row:
            raise ProcessorFault(_ONE_BY_ONE, digest="", name="", kind="exception")
        seconds.append(called.seconds)
        for player, token in zip(players, called.logits.argmax(dim=-1).tolist(), strict=True):
            player.tokens.append(token)
    for player in players:
        player.row.close()
    return statistics.median(seconds[WARM_UP:])


def _history_findings(rehearsal: DryRun, recordings: Sequence[Recording], logits: torch.Tensor) -> list[Finding]:
    """Does a step take longer, the longer the output is?"""
    few, many = _HISTORY_LENGTHS
    # Before and after: where something else keeps the machine busy for a while, one of the two is slow as well.
    seconds = [own_seconds(rehearsal, recordings, logits, length) for length in (few, many, few)]
    # A long output that it would not have written itself may be nothing that it can work with.
    before, at_many, after = (None if each is None else _per_row(each, len(logits)) for each in seconds)
    if before is None or at_many is None or after is None:
        return []
    short, long = max(before, after), at_many
    if long < 2 * short or long - short < _COSTLY_HISTORY:
        return []
    seen = (
        f"a step takes longer, the longer the output is: {short:,.0f} µs a row at {few} tokens, {long:,.0f} at {many:,}"
    )
    advice = "Read only the new tokens: keep in __req__.state what you found, and how far you have read."
    facts = {f"microseconds_a_row_at_{few}": short, f"microseconds_a_row_at_{many}": long}
    return [Finding("speed", Severity.WARNING, seen, advice, facts)]


def _too_slow(rows: int, fault: ProcessorFault) -> Finding:
    seen = f"a call with {rows} rows fails: {fault.message}"
    advice = "Servers call it once for all rows that carry it: work on all rows at once."
    return Finding("speed", Severity.ERROR, seen, advice, {"rows": rows, "fault": fault.kind}, fault.traceback)


def _verdicts(timings: Sequence[BatchTiming], loops: Sequence[RowLoop]) -> list[Finding]:
    if not timings:
        return []
    largest = timings[-1]
    own = largest.total if largest.own is None else largest.own
    findings = []
    if own > SLOW_ROW:
        step = own * largest.rows / 1e3
        seen = f"{own:,.0f} µs a row: with {largest.rows} rows, it adds {step:,.1f} ms to each token"
        advice = "See the slowest lines. What does not change from step to step belongs into __req__.state or on self."
        findings.append(Finding("speed", Severity.WARNING, seen, advice, {"microseconds_a_row": own}))
    for loop in loops:
        severity = Severity.WARNING if own >= COSTLY_LOOP else Severity.NOTE
        seen = f"it loops over rows: {loop.place}\n    {loop.text}"
        findings.append(Finding("speed", severity, seen, loop.advice, {"file": loop.file, "line": loop.line}))
    return findings


def _summary(timings: Sequence[BatchTiming]) -> str:
    if not timings:
        return "no call could be timed"
    largest = timings[-1]
    step = largest.total * largest.rows / 1e3
    return f"{largest.total:,.0f} µs a row and {step:,.1f} ms a step with {largest.rows} rows"
