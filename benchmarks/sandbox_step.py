"""Step time of a processor in a sandbox, compared with the same processor in the server's process.

    python benchmarks/sandbox_step.py

Both take turns in one run, and with them two plain copies of the rows, which a sandbox cannot do without. What is left
of a sandboxed step after those two is its overhead. A second table takes the sandboxed step apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from comparison import print_machine
from sandbox_parts import PARTS, time_parts
from sandbox_workload import BODIES, Model, Step, copies_step, sandbox_executor, shipped_step, source

from logitship.builtin_processors.sglang_names import SGLANG_NAMES
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor

MODEL = ModelView(4, frozenset(), None)

SHAPES = ("1x49152", "4x49152", "8x49152", "32x49152", "8x151936")

ALLOWED_OVERHEAD = 150.0
"""Microseconds that logitship promises to stay within."""


@dataclass(frozen=True)
class Case:
    """Line of the table.

    Attributes:
        body: of the processor, a key of `BODIES`.
        processors: how many different ones run at once; each has as many rows as the others.
        gap: seconds that a model computes before each step, as in a server, so that little of what the step needs is
            still in the caches; 0 has the steps follow one another.
    """

    body: str
    rows: int
    vocab_size: int
    processors: int
    gap: float


@dataclass(frozen=True)
class Result:
    """Times of a case in microseconds.

    Attributes:
        median: by side: "in_process", "copies" (there and back) and "sandbox".
        p99: the same.
        overhead: what a sandboxed step takes beyond the other two: the median of the turns' differences.
        parts: of a sandboxed step, medians; empty where several processors run at once.
    """

    case: Case
    median: dict[str, float]
    p99: dict[str, float]
    overhead: float
    parts: dict[str, float]


def measure(case: Case, sandboxes: SandboxExecutor, rounds: int, calls: int, history: int) -> Result:
    """Time a case, with the sides in turns."""
    logits = torch.randn(case.rows, case.vocab_size)
    model = Model(logits, case.gap)
    strings = [source(case.body, number) for number in range(case.processors)]
    in_process = InProcessExecutor(SGLANG_NAMES, MODEL)
    sandboxed = [sandboxes.load(string) for string in strings]
    steps = {
        "in_process": shipped_step(case.body, logits, [in_process.load(string) for string in strings], history),
        "copies": copies_step(logits),
        "sandbox": shipped_step(case.body, logits, sandboxed, history),
    }
    turns: dict[str, list[list[float]]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            turns[name].append([time_step(model, step) for _ in range(calls)])
    for processor in sandboxed:
        sandboxes.unload(processor)
    # Without the first turn, which pays for what is made on first use.
    times = {name: sorted(itertools.chain.from_iterable(each[1:])) for name, each in turns.items()}
    medians = [[statistics.median(turn) for turn in turns[name][1:]] for name in ("sandbox", "in_process", "copies")]
    return Result(
        case,
        median={name: statistics.median(each) for name, each in times.items()},
        p99={name: each[int(len(each) * 0.99)] for name, each in times.items()},
        overhead=statistics.median(sandbox - rest - copies for sandbox, rest, copies in zip(*medians, strict=True)),
        parts=time_parts(case.body, sandboxes, logits, model, rounds * calls, history) if case.processors == 1 else {},
    )


def time_step(model: Model, step: Step) -> float:
    """Return the microseconds of a step, without the model's part before it."""
    model()
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e6


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Return all cases, grouped by vocabulary."""
    shapes = sorted((tuple(map(int, shape.split("x"))) for shape in options.shapes), key=lambda shape: shape[::-1])
    for (rows, vocab_size), gap, body in itertools.product(shapes, (0.0, options.gap), options.bodies):
        yield Case(body, rows, vocab_size, 1, gap)
        if rows >= options.processors > 1:
            yield Case(body, rows, vocab_size, options.processors, gap)


HEADING = (
    f"{'vocab':>6} {'rows':>4} {'processors':>10} {'gap':>5} {'does':8}  {'in process':>15} {'two copies':>15} "
    f"{'sandbox':>15}  {'overhead':>8}"
)


def table_line(result: Result) -> str:
    """One line of the table."""
    sides = " ".join(
        f"{result.median[name]:7.0f}{result.p99[name]:8.0f}" for name in ("in_process", "copies", "sandbox")
    )
    return f"{_setting(result.case)}  {sides}  {result.overhead:8.0f}"


def parts_line(result: Result) -> str:
    """Return a line of the second table."""
    return f"{_setting(result.case)}  " + " ".join(f"{result.parts[name]:9.0f}" for name in PARTS)


def _setting(case: Case) -> str:
    gap = f"{case.gap * 1e3:g} ms" if case.gap else "-"
    return f"{case.vocab_size:6} {case.rows:4} {case.processors:10} {gap:>5} {case.body:8}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxVOCAB")
    parser.add_argument("--bodies", nargs="+", choices=BODIES, default=list(BODIES), help="what the processors do")
    parser.add_argument("--processors", type=int, default=8, help="different ones at once, in lines of their own")
    parser.add_argument("--gap", type=float, default=0.01, help="seconds of model-like work between steps")
    parser.add_argument("--history", type=int, default=1000, help="output tokens that each row begins with")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--calls", type=int, default=20, help="steps in each turn")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads of the server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(arguments)
    facts = print_machine(options.threads)
    print(f"\nmicroseconds, median and 99th percentile of {options.rounds * options.calls} steps")
    print(f"overhead: sandbox - in process - two copies; promised: {ALLOWED_OVERHEAD:g}\n\n{HEADING}")
    results: list[Result] = []
    with torch.inference_mode():
        for vocab_size, same_vocab in itertools.groupby(cases(options), key=lambda case: case.vocab_size):
            wanted = list(same_vocab)
            with sandbox_executor(max(case.rows for case in wanted), vocab_size) as sandboxes:
                for case in wanted:
                    results.append(measure(case, sandboxes, options.rounds, options.calls, options.history))
                    print(table_line(results[-1]), flush=True)
    print("\nThe parts of a sandboxed step, microseconds, medians\n")
    print(f"{HEADING[:37]}  " + " ".join(f"{name:>9}" for name in PARTS))
    for result in results:
        if result.parts:
            print(parts_line(result))
    if options.json:
        options.json.write_text(
            json.dumps({"machine": facts, "results": [asdict(each) for each in results]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
