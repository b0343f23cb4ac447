"""The check `speed`: time per row, slowest lines, loops over rows, and cost of a long history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from linecache import getline

import torch

from logitship.client.check_report import BatchTiming, CheckResult, Finding, Severity, SlowLine
from logitship.client.errors import ProcessorFault
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.processor_string import PickledProcessor
from logitship.server.check.dry_run import DryRun
from logitship.server.check.environment import CheckEnvironment, FreshProcessor
from logitship.server.check.findings import advice_for, result
from logitship.server.check.line_profiler import measure_lines
from logitship.server.check.local_timing import median_of_calls, median_seconds
from logitship.server.check.replayed_calls import Recording
from logitship.server.check.row_loops import row_loop_around

SLOW_ROW = 200.0
"""Microseconds per row of the author's own code. 64 rows then take 13 ms, half a step of a small model."""
COSTLY_LOOP = 20.0
"""Microseconds per row above which a loop over rows is a warning, if the slowest line is in it."""
_KEEP_ADVICE = "Keep what does not change from step to step in __req__.state or on self."
_FEW_ROWS = 8
"""Batch size of the calls that are profiled."""
_FAILS_AS_BATCH = "it raises an exception for these rows in one batch, and for none of them alone"
_HISTORY_LENGTHS = (32, 2048)
"""Output tokens of the two calls that are compared."""
COSTLY_HISTORY = 50.0
"""Additional microseconds per row with the long history above which it is a warning."""


def check_speed(
    environment: CheckEnvironment,
    string: PickledProcessor,
    cls: type[CustomLogitProcessor],
    recordings: Sequence[Recording],
    dry_run: DryRun | None,
    batch_sizes: Sequence[int],
) -> tuple[CheckResult, list[BatchTiming], list[SlowLine]]:
    """Time calls in the sandbox, and profile lines in this process.

    Returns:
        The result, and the tables that the report shows below it: times by batch size, and the slowest lines.
    """
    base = torch.randn(max(batch_sizes), environment.model.vocab_size, generator=torch.Generator().manual_seed(0))
    timings: list[BatchTiming] = []
    findings: list[Finding] = []
    with environment.fresh_processor(string) as processor:
        for rows in sorted(set(batch_sizes)):
            try:
                total = _median_call(processor, recordings, base[:rows])
            except ProcessorFault as fault:
                findings.append(_failed_call(rows, fault))
                break
            own = None if dry_run is None else median_seconds(dry_run, recordings, base[:rows])
            timings.append(BatchTiming(rows, _per_row(total, rows), None if own is None else _per_row(own, rows)))
        overlap = _overlap(processor)
    lines: list[SlowLine] = []
    if dry_run is not None and not findings:  # a call that fails in a sandbox might hang or end this process
        findings += _history_findings(dry_run, recordings, base[:_FEW_ROWS])
        lines = measure_lines(cls, dry_run, recordings, base[:_FEW_ROWS])
    if timings:
        findings += _timing_findings(timings[-1], cls, lines)
    return result("speed", _summary(timings) + overlap, findings), timings, lines


def _per_row(seconds: float, rows: int) -> float:
    """Convert seconds per call to microseconds per row."""
    return round(seconds / rows * 1e6, 2)


def _median_call(processor: FreshProcessor, recordings: Sequence[Recording], logits: torch.Tensor) -> float:
    """Return the median seconds of a call in the sandbox. Each sequence appends its most likely token after each.

    Raises:
        ProcessorFault: a call fails.
    """
    cases = [recordings[row % len(recordings)].case for row in range(len(logits))]
    sequences = [
        processor.start_sequence(f"{each.rid}-{row}", each.params, each.prompt_token_ids)
        for row, each in enumerate(cases)
    ]

    def call(number: int) -> float:
        called = processor.call(sequences, logits)
        if called.faults:
            raise called.faults[min(called.faults)]
        if called.row_by_row:
            raise ProcessorFault(_FAILS_AS_BATCH, digest="", name="", kind="exception")
        for sequence, token in zip(sequences, called.logits.argmax(dim=-1).tolist(), strict=True):
            sequence.tokens.append(token)
        return called.seconds

    median = median_of_calls(call)
    for sequence in sequences:
        sequence.row.close()
    return median


def _history_findings(dry_run: DryRun, recordings: Sequence[Recording], logits: torch.Tensor) -> list[Finding]:
    """Check whether a step takes longer as the output grows."""
    few, many = _HISTORY_LENGTHS
    # Measure the short history before and after: if the machine is busy for a while, one of the two is slow as well.
    seconds = [median_seconds(dry_run, recordings, logits, length) for length in (few, many, few)]
    # A call may fail: the long output is not one that the processor would have produced.
    before, at_many, after = (None if each is None else _per_row(each, len(logits)) for each in seconds)
    if before is None or at_many is None or after is None:
        return []
    short, long = max(before, after), at_many
    if long < 2 * short or long - short < COSTLY_HISTORY:
        return []
    seen = f"a step takes longer as the output grows: {short:,.0f} µs per row at {few} tokens, {long:,.0f} at {many:,}"
    advice = "Read only the new tokens: keep the result and your position in __req__.state."
    facts = {f"microseconds_per_row_at_{few}": short, f"microseconds_per_row_at_{many}": long}
    return [Finding("speed", Severity.WARNING, seen, advice, facts)]


def _failed_call(rows: int, fault: ProcessorFault) -> Finding:
    seen = f"a call with {rows} rows fails: {fault.message}"
    facts = {"rows": rows, "fault": fault.kind}
    return Finding("speed", Severity.ERROR, seen, advice_for(fault, rows), facts, fault.traceback)


def _timing_findings(
    largest: BatchTiming, cls: type[CustomLogitProcessor], lines: Sequence[SlowLine]
) -> Iterator[Finding]:
    """Yield warnings about the largest call, and about the loop over rows that its slowest line is in."""
    # Edits of logits that are only recorded in a sandbox are made when the code is measured alone.
    own = largest.total if largest.own is None else min(largest.own, largest.total)
    if own > SLOW_ROW:
        step = own * largest.rows / 1e3
        seen = f"{own:,.0f} µs per row: with {largest.rows} rows, it adds {step:,.1f} ms to each token"
        advice = f"See the slowest lines. {_KEEP_ADVICE}"
        yield Finding("speed", Severity.WARNING, seen, advice, {"microseconds_per_row": own})
    loop = row_loop_around(cls, lines[0]) if lines and own >= COSTLY_LOOP else None
    if loop is not None:
        file = lines[0].file
        seen = f"it loops over rows: {file.rpartition('/')[2]}:{loop.lineno}\n    {getline(file, loop.lineno).strip()}"
        advice = f"{_KEEP_ADVICE} Collect what differs from row to row in lists, and edit all rows at once."
        yield Finding("speed", Severity.WARNING, seen, advice, {"file": file, "line": loop.lineno})


def _overlap(processor: FreshProcessor) -> str:
    """Return the end of the summary: whether calls can begin before their logits exist; "" if it is not known."""
    reads = processor.reads
    if processor.dense_reason:
        return f"; it runs after the model: {processor.dense_reason}"
    if reads is None or not reads.num_promised:
        return ""
    if reads.num_read == 0:
        return "; it uses no logit, and runs while the model computes"
    return "; it uses logits, and runs after the model"


def _summary(timings: Sequence[BatchTiming]) -> str:
    if not timings:
        return "no call could be timed"
    largest = timings[-1]
    step = largest.total * largest.rows / 1e3
    return f"{largest.total:,.0f} µs per row and {step:,.1f} ms per step with {largest.rows} rows"
