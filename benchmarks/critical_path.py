"""Time from "the logits are there" to "the processors' edits are in them", while nothing else of a step can go on.

    python benchmarks/critical_path.py

Five sides take turns, with the same classes and parameters:

* promised: sandboxed, called before the model computes, as the engine does it. `begin` is measured too.
* dense: sandboxed, called with the logits, which are copied there and back.
* in process: in the server's process.
* SGLang: its `apply_custom_logit_processor`, in process.
* copies: two plain copies of the logits.

The model is a device that is busy for ten milliseconds without using a core; `--cores` has it use all cores instead.
With `--device cuda` the logits are on a GPU, which is busy as long, and measures the time after it:

    python benchmarks/critical_path.py --device cuda --vocab-sizes 151936 --max-rows 256
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from comparison import OF_PEER, Comparison, Target, alone, arguments, at_most, compare, in_turns, print_machine, report
from group_step import PEERS
from sandbox_workload import BODIES, SOURCE, Model, Step, copies_step, request_params, sandbox_executor, source

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor

MODEL = ModelView(4, frozenset(), None)

BENCHMARK = "critical path"
SHAPES = ((1, 1), (8, 1), (8, 8), (32, 1), (32, 8), (32, 32), (256, 1), (256, 32))
DEVICE_SECONDS = 0.01
FEW_STEPS = 8


@dataclass(frozen=True)
class Case:
    """Rows of the batch, and how many different processors share them.

    Attributes:
        body: of the processors, a key of `BODIES`.
    """

    rows: int
    processors: int
    vocab_size: int
    body: str

    def __str__(self) -> str:
        return f"{self.body} {self.rows}×{self.processors}, {self.vocab_size}"

    @property
    def targets(self) -> dict[str, Target]:
        """Bounds of the promised side's ratios, by the other side."""
        if self.body not in ("ban", "lookup"):
            return {}
        if self.processors == 1:
            return {"SGLang": at_most(1.0)} if self.rows == 1 else {"dense": at_most(0.15)} if self.rows == 32 else {}
        return {"in process": at_most(1.0)} if self.processors == self.rows else {}


class Clock(Protocol):
    """A model, and the time after it."""

    def seconds_after_model(self, step: Step) -> float:
        """Run the model, then a step, and return how long the step takes after the logits are there."""
        ...


class CPUClock:
    """Clock of logits on the CPU, which wait for the model."""

    def __init__(self, model: Step) -> None:
        self._model = model

    def seconds_after_model(self, step: Step) -> float:
        """See `Clock`."""
        self._model()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began


class GPUClock:
    """Clock of logits on a GPU: the step is queued there while the model computes, as far as it needs no values."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._cycles = int(1e3 * torch.cuda.get_device_properties(device).clock_rate * seconds)

    def seconds_after_model(self, step: Step) -> float:
        """See `Clock`."""
        ready, applied = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        ready.record()
        step()
        applied.record()
        applied.synchronize()
        milliseconds: float = ready.elapsed_time(applied)
        return 1e-3 * milliseconds


class Side:
    """One way to run the processors of a case.

    Attributes:
        begin_seconds: what each step took before the model.
    """

    def __init__(self, clock: Clock, begin: Step, apply: Step) -> None:
        self._clock = clock
        self._begin = begin
        self._apply = apply
        self.begin_seconds: list[float] = []

    def turn(self) -> float:
        """Return the median time of some steps after the model, in microseconds."""
        return 1e6 * statistics.median(self._step() for _ in range(FEW_STEPS))

    def _step(self) -> float:
        began = time.perf_counter()
        self._begin()
        self.begin_seconds.append(time.perf_counter() - began)
        return self._clock.seconds_after_model(self._apply)


def shipped_side(
    case: Case, clock: Clock, logits: torch.Tensor, processors: Sequence[LoadedProcessor], *, early: bool
) -> Side:
    """Return the side that runs loaded processors as the sampler does.

    Args:
        early: begin calls before the model.
    """
    model = ModelView(case.vocab_size, frozenset({0}), None)
    shipped = ShippedProcessors(None, logits.device, logits.is_cuda, model=model, check_last=False)
    outputs = [[1] for _ in range(case.rows)]
    added = []
    for row, output in enumerate(outputs):
        processor = processors[row * case.processors // case.rows]
        use = ProcessorUse(processor, request_params(case.body, row, case.vocab_size), str(row))
        added.append((row, SamplingParams(processors=(use,)), [0], output))
    shipped.update_state(BatchUpdate(case.rows, [], added, []))

    def begin() -> None:
        for output in outputs:
            output.append(len(output) % 50)
        shipped.update_state(None)
        if early:
            shipped.begin()

    def apply() -> None:
        shipped.apply(logits)
        if faults := shipped.take_faults():
            raise SystemExit(f"a processor failed: {faults[0][1]}")

    return Side(clock, begin, apply)


def sglang_side(case: Case, clock: Clock, logits: torch.Tensor, peer: Any) -> Side:
    """Return SGLang's side, with instances of the same classes."""
    size = case.rows // case.processors
    instances = [
        (_instance(case.body, number), list(range(number * size, (number + 1) * size)))
        for number in range(case.processors)
    ]
    requests = [SimpleNamespace(origin_input_ids=[0], output_ids=[1]) for _ in range(case.rows)]
    params = [
        {**request_params(case.body, row, case.vocab_size), "__req__": request} for row, request in enumerate(requests)
    ]
    step = peer.step(instances, params, logits.device)

    def begin() -> None:
        for request in requests:
            request.output_ids.append(len(request.output_ids) % 50)

    return Side(clock, begin, partial(step, logits))


def _instance(body: str, number: int) -> CustomLogitProcessor:
    names: dict[str, Any] = {}
    exec(SOURCE.format(body=BODIES[body].strip(), number=number), names)  # the classes of this benchmark
    instance: CustomLogitProcessor = names[f"Processor{number}"]()
    return instance


def measure(
    case: Case, sandboxes: SandboxExecutor, peer: Any, turns: int, device: torch.device, *, cores: bool
) -> Iterator[Comparison]:
    """Time a case, with the sides in turns."""
    logits = torch.randn(case.rows, case.vocab_size, device=device)
    clock: Clock
    if device.type == "cuda":
        clock = GPUClock(device, DEVICE_SECONDS)
    else:
        clock = CPUClock(Model(logits, DEVICE_SECONDS) if cores else partial(time.sleep, DEVICE_SECONDS))
    strings = [source(case.body, number) for number in range(case.processors)]
    in_process = InProcessExecutor({}, MODEL)
    promised = [sandboxes.load(string, "promised") for string in strings]
    dense = [sandboxes.load(string, "dense") for string in strings]
    for processor in dense:
        processor.instance.reads.never_promise = True
    local = [in_process.load(string) for string in strings]
    sides = {
        "promised": shipped_side(case, clock, logits, promised, early=True),
        "dense": shipped_side(case, clock, logits, dense, early=False),
        "in process": shipped_side(case, clock, logits, local, early=False),
        "copies": Side(clock, lambda: None, copies_step(logits)),
    }
    if peer is not None:
        sides["SGLang"] = sglang_side(case, clock, logits, peer)
    for side in sides.values():
        side.turn()
        side.begin_seconds.clear()
    ours, *others = in_turns([side.turn for side in sides.values()], turns)
    for name, theirs in zip(list(sides)[1:], others, strict=True):
        target = case.targets.get(name)
        title = f"{case}, vs. {name}"
        yield compare(BENCHMARK, title, ours, theirs, unit="µs", peer_name=name, kind=OF_PEER, target=target)
    begin = [1e6 * seconds for seconds in sides["promised"].begin_seconds]
    yield alone(BENCHMARK, f"{case}, begin", begin, unit="µs")
    for processor in (*promised, *dense):
        sandboxes.unload(processor)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print as it goes."""
    parser = arguments(__doc__)
    parser.add_argument("--bodies", nargs="+", default=["ban", "lookup", "softmax"], choices=sorted(BODIES))
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--max-rows", type=int, default=32, help="leave out the cases with more rows")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="of the logits: cpu or cuda")
    parser.add_argument("--cores", action="store_true", help="a model that uses all cores instead of a device")
    parser.add_argument("--without-sglang", action="store_true", help="nothing is downloaded")
    options = parser.parse_args(argv)
    print_machine(options.threads)
    peer = None
    if not options.without_sglang:
        sys.path.insert(0, str(PEERS))
        import sglang_peer  # type: ignore[import-not-found, unused-ignore]

        peer = sglang_peer.load()

    def comparisons() -> Iterator[Comparison]:
        for vocab_size in options.vocab_sizes:
            shapes = [shape for shape in SHAPES if shape[0] <= options.max_rows]
            with sandbox_executor(max(rows for rows, _ in shapes), vocab_size) as sandboxes:
                for body in options.bodies:
                    for rows, processors in shapes:
                        case = Case(rows, processors, vocab_size, body)
                        yield from measure(case, sandboxes, peer, options.turns, options.device, cores=options.cores)

    report(comparisons(), options.json)


if __name__ == "__main__":
    main()
