"""Step time of the built-in processors as the history grows, compared with SGLang's own code.

    python benchmarks/builtin_step.py

Both run in this process and take turns. In each step every row gains a token. Of logitship, all that the sampler does
for it is timed: following the outputs, and the call. Of SGLang, its processor's call alone, without the copies of the
rows that SGLang makes before and after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from builtin_cases import CASES, TOKENIZER, VOCAB_SIZE, Case
from comparison import print_machine

from logitship.builtin_processors import installed_processors
from logitship.builtin_processors.base import BuiltinProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import take_faults
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams

MODEL = ModelView(4, frozenset(), None)

PEERS = Path(__file__).parents[1] / "tests" / "peers"

Step = Callable[[], object]
MakeStep = Callable[[Case, torch.Tensor, "Histories"], Step]


class Histories:
    """Tokens of all rows. Each step appends one to each row.

    Attributes:
        prompts: of each row, the beginning of its history.
        outputs: of each row, the rest of it, and what came since.
    """

    def __init__(self, case: Case, rows: int, length: int, steps: int) -> None:
        tokens = [case.tokens(row, length + steps) for row in range(rows)]
        begin = length // 2 if case.prompt_length is None else case.prompt_length
        self.prompts = [row[:begin] for row in tokens]
        self.outputs = [row[begin:length] for row in tokens]
        self._new = iter(list(zip(*(row[length:] for row in tokens), strict=True)))

    def next_tokens(self) -> tuple[int, ...]:
        """Return the tokens that the rows gain in a step."""
        return next(self._new)


def logitship_step(case: Case, logits: torch.Tensor, histories: Histories) -> Step:
    """Return the processor's part of a step, as the sampler runs it."""
    stage, params = stage_of(case)
    sequences = zip(histories.prompts, histories.outputs, strict=True)
    added = [(row, params(row), prompt, output) for row, (prompt, output) in enumerate(sequences)]
    stage.update_state(BatchUpdate(len(added), [], added, []))

    def step() -> None:
        for output, token in zip(histories.outputs, histories.next_tokens(), strict=True):
            output.append(token)
        stage.update_state(None)
        stage.apply(logits)
        for _, fault in take_faults([stage]):
            raise SystemExit(f"{case.title} failed: {fault}")

    return step


def stage_of(case: Case) -> tuple[LogitsProcessor, Callable[[int], SamplingParams]]:
    """Return a batch processor, and a function that makes the sampling parameters of a row."""
    if case.make_batch_processor:
        return case.make_batch_processor(), lambda row: SamplingParams(**case.params(row))
    model = ModelView(VOCAB_SIZE, frozenset({0}), TOKENIZER)
    instance = installed_processors().make(case.processor)
    assert isinstance(instance, BuiltinProcessor)
    loaded = LoadedProcessor("sha256:0", case.processor, InProcessExecutor({}, MODEL), instance, is_trusted=True)

    def sampling_params(row: int) -> SamplingParams:
        params = case.params(row)
        return SamplingParams(processors=(ProcessorUse(loaded, params, str(row), instance.prepare(params, model)),))

    return ShippedProcessors(None, torch.device("cpu"), False, model=model), sampling_params


def sglang_steps() -> MakeStep:
    """Load SGLang's processors; return a function that makes steps of them."""
    sys.path.insert(0, str(PEERS))
    import sglang_peer  # type: ignore[import-not-found, unused-ignore]

    module = sglang_peer.load().custom_logit_processor

    def make(case: Case, logits: torch.Tensor, histories: Histories) -> Step:
        assert case.sglang_class is not None
        processor = getattr(module, case.sglang_class)()
        # SGLang's scheduler keeps tokens in arrays.
        requests = [
            SimpleNamespace(origin_input_ids=array("q", prompt), output_ids=array("q", output))
            for prompt, output in zip(histories.prompts, histories.outputs, strict=True)
        ]
        params = [{**case.params(row), "__req__": request} for row, request in enumerate(requests)]

        def step() -> None:
            for request, token in zip(requests, histories.next_tokens(), strict=True):
                request.output_ids.append(token)
            processor(logits, params)

        return step

    return make


@dataclass(frozen=True)
class Result:
    """Times of a case in microseconds, by side and by the tokens of history.

    Attributes:
        median: of all steps.
        fastest: of all steps: what other work on the machine disturbed least.
    """

    case: str
    median: dict[str, dict[int, float]]
    fastest: dict[str, dict[int, float]]


def measure(
    case: Case, sides: Mapping[str, MakeStep], logits: torch.Tensor, lengths: Sequence[int], rounds: int, calls: int
) -> Result:
    """Time a case, with the sides and the lengths in turns."""
    times: dict[str, dict[int, list[float]]] = {side: {length: [] for length in lengths} for side in sides}
    for _ in range(rounds):
        for length in lengths:
            for side, make_step in sides.items():
                # The masks and forced tokens of one turn must not change the work of the next one.
                logits.normal_()
                logits[:, 0] = -10.0  # the EOS token is unlikely: processors that wait for it have nothing to do
                step = make_step(case, logits, Histories(case, len(logits), length, calls + 1))
                step()  # the first step reads the whole history
                with no_collection():
                    times[side][length] += [time_step(step) for _ in range(calls)]
    return Result(
        case.title,
        median={side: {length: statistics.median(each[length]) for length in lengths} for side, each in times.items()},
        fastest={side: {length: min(each[length]) for length in lengths} for side, each in times.items()},
    )


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection, whose time depends on all objects, those of other turns included."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_step(step: Step) -> float:
    """Return the microseconds of a step."""
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e6


def heading(lengths: Sequence[int]) -> str:
    """Return the heading of the table, two lines."""
    width = 8 * len(lengths) + 8
    columns = "".join(f"{length:8}" for length in lengths) + f"{'growth':>8}"
    return f"{'':34}{'logitship':>{width}}{'SGLang':>{width}}\n{'':34}{columns}{columns}"


def table_line(result: Result, lengths: Sequence[int]) -> str:
    """Return a line of the table: medians, and the ratio of the last to the first."""
    line = f"{result.case:34}"
    for side in ("logitship", "sglang"):
        if side in result.median:
            each = result.median[side]
            line += (
                "".join(f"{each[length]:8.0f}" for length in lengths) + f"{each[lengths[-1]] / each[lengths[0]]:8.2f}"
            )
    return line


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processors", nargs="+", choices=sorted({case.processor for case in CASES}), metavar="NAME")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 8000], help="tokens of history")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--calls", type=int, default=10, help="steps in each turn")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    parser.add_argument("--without-sglang", action="store_true", help="only time logitship: nothing is downloaded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(arguments)
    facts = print_machine(options.threads)
    print(f"\nmicroseconds of a step of {options.rows} rows, medians of {options.rounds * options.calls}, by history")
    print(f"growth: the longest history's over the shortest's\n\n{heading(options.lengths)}")
    ours: dict[str, MakeStep] = {"logitship": logitship_step}
    both = ours if options.without_sglang else ours | {"sglang": sglang_steps()}
    logits = torch.empty(options.rows, VOCAB_SIZE)
    results: list[Result] = []
    with torch.inference_mode():
        for case in CASES:
            if case.processor in (options.processors or [case.processor]):
                sides = both if case.sglang_class else ours
                results.append(measure(case, sides, logits, options.lengths, options.rounds, options.calls))
                print(table_line(results[-1], options.lengths), flush=True)
    if options.json:
        figures: dict[str, Any] = {"machine": facts, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
