"""Step time of shipped processors in this process, compared with SGLang's step and with bare calls.

    python benchmarks/group_step.py

Three sides call the same processor object for the same rows, in turns:

* logitship: all that its sampler does for a step's processors. Requests arrive in the persistent batch, and rows change
  places as the engine does it, so that a group's rows are adjacent whatever order they came in.
* SGLang: its `apply_custom_logit_processor`, which copies a group's rows out of the logits and back.
* calls: the processor on a contiguous view of each group's rows, and nothing else.

Each row gains a token between two steps, which is not timed. Neither is what the sampler does for every row, with
processors or without: its search for the largest logit, which is also the check of what processors left.

There are two processors. SGLang's own `DisallowedTokensLogitsProcessor` looks at the parameters of each row, as most
processors do. `ForbidTokens` does hardly anything, so that what surrounds a call shows most.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from comparison import (
    OF_OURS,
    OF_PEER,
    Comparison,
    alone,
    arguments,
    at_least,
    at_most,
    compare,
    in_turns,
    report,
)
from step_side import StepSide

from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.batch.persistent_batch import PersistentBatch, adjacent_swaps
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.processor_groups import ProcessorUse, group_key
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.metrics.observed_metrics import EngineMetrics
from logitship.server.metrics.step_clock import StepClock, TimedProcessors

PEERS = Path(__file__).parents[1] / "tests" / "peers"
BENCHMARK = "processors without a sandbox"
NUM_FORBIDDEN = 100
GROUPS = (1, 4, 32)

MODEL = ModelInfo("model", "model", 0, 0, frozenset({0}), "float32", "cpu", "Model")


class ForbidTokens(CustomLogitProcessor):
    """One indexed write for all rows: almost the least that a processor can do."""

    def __init__(self) -> None:
        self._token_ids: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Forbid the first row's tokens in all rows."""
        assert custom_param_list
        if self._token_ids is None:
            self._token_ids = torch.tensor(custom_param_list[0]["token_ids"])
        logits[:, self._token_ids] = -torch.inf
        return logits


@dataclass(frozen=True)
class Case:
    """Line of the table.

    Attributes:
        processor: its class; each group has an instance of its own.
        interleaved: the groups' requests arrive in turns, and not group by group.
    """

    processor: type[Any]
    rows: int
    vocab_size: int
    groups: int
    interleaved: bool = False

    def __str__(self) -> str:
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        arrival = "" if self.groups in {1, self.rows} else " interleaved" if self.interleaved else " adjacent"
        return f"{self.title} {self.rows}×{self.vocab_size}, {groups}{arrival}"

    @property
    def title(self) -> str:
        """Short name of the processor."""
        return self.processor.__name__.partition("Tokens")[0].lower()

    def group_of(self, row: int) -> int:
        """Return the group of the request that arrives at this position."""
        return row % self.groups if self.interleaved else row * self.groups // self.rows


@dataclass
class Request:
    """Request in the persistent batch."""

    sampling_params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class Sides:
    """Both sides of a case, with the same logits, processors and parameters."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._logits = torch.randn(case.rows, case.vocab_size)
        self._instances = [case.processor() for _ in range(case.groups)]
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randperm(case.vocab_size, generator=generator)[:NUM_FORBIDDEN]
        # A list for each request, as if each had come by HTTP.
        self._params = [{"token_ids": token_ids.tolist()} for _ in range(case.rows)]

    def logitship(self) -> StepSide:
        """Return our step: batch, row order and processors as in the engine and its sampler."""
        model = ModelView(self._case.vocab_size, frozenset({0}), None)
        executor = InProcessExecutor({}, model)
        loaded = [
            LoadedProcessor(f"sha256:{n}", self._case.processor.__name__, executor, each)
            for n, each in enumerate(self._instances)
        ]
        batch: PersistentBatch[Request] = PersistentBatch(self._case.rows)
        requests = []
        for row, params in enumerate(self._params):
            use = ProcessorUse(loaded[self._case.group_of(row)], params, str(row))
            requests.append(Request(SamplingParams(processors=(use,)), [1, 2, 3], [4]))
            batch.add(requests[-1])
        for row, other in adjacent_swaps([group_key(request.sampling_params) for request in batch.members]):
            batch.swap(row, other)
        metrics = EngineMetrics(MODEL, {})
        shipped = TimedProcessors(
            None,
            self._logits.device,
            False,
            model=model,
            on_call=metrics.call_observer,
            check_last=False,
            clock=StepClock(),
        )
        shipped.update_state(batch.commit())

        def step() -> None:
            shipped.update_state(None)
            shipped.apply(self._logits)
            for _, fault in shipped.take_faults():
                raise fault

        return StepSide(step, [request.output_token_ids for request in requests])

    def sglang(self, peer: Any) -> StepSide:
        """Return SGLang's step."""
        params, outputs = self._request_params()
        case = self._case
        rows_of = [[row for row in range(case.rows) if case.group_of(row) == group] for group in range(case.groups)]
        step = peer.step(list(zip(self._instances, rows_of, strict=True)), params)
        return StepSide(lambda: step(self._logits), outputs)

    def calls(self) -> StepSide:
        """Return a loop of bare calls."""
        params, outputs = self._request_params()
        size = self._case.rows // self._case.groups
        calls = [
            (instance, n * size, (n + 1) * size, params[n * size : (n + 1) * size])
            for n, instance in enumerate(self._instances)
        ]

        def step() -> None:
            for instance, first, end, rows in calls:
                instance(self._logits[first:end], rows)

        return StepSide(step, outputs)

    def _request_params(self) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Return the parameters that SGLang's processors get for each row, and the rows' outputs."""
        requests = [SimpleNamespace(origin_input_ids=[1, 2, 3], output_ids=[4]) for _ in self._params]
        params = [{**sent, "__req__": request} for sent, request in zip(self._params, requests, strict=True)]
        return params, [request.output_ids for request in requests]


def measure(case: Case, peer: Any, turns: int) -> Iterator[Comparison]:
    """Time a case; without a peer, compared with bare calls only."""
    sides = Sides(case)
    all_sides = [sides.logitship(), sides.calls()] + ([sides.sglang(peer)] if peer else [])
    for side in all_sides:
        side.choose_calls()
    gc.collect()
    gc.freeze()  # the collections between turns then have nothing to look at
    ours, calls, *sglang = in_turns([side.turn for side in all_sides], turns)
    gc.unfreeze()
    for theirs in sglang:
        target = at_least(10) if case.rows >= 32 else None
        yield compare(BENCHMARK, str(case), ours, theirs, unit="µs", peer_name="SGLang", kind=OF_OURS, target=target)
    title = f"{case}, vs. bare calls"
    yield compare(BENCHMARK, title, ours, calls, unit="µs", peer_name="bare calls", kind=OF_PEER, target=at_most(1.1))
    if case.rows == case.groups:
        added = [(one - other) / case.groups for one, other in zip(ours, calls, strict=True)]
        yield alone(BENCHMARK, f"{case}, on top of bare calls", added, unit="µs/group")


def cases(processors: Iterable[type[Any]], all_rows: Sequence[int], vocab_sizes: Sequence[int]) -> Iterator[Case]:
    """Yield all cases."""
    for processor, vocab_size, rows, groups in product(processors, vocab_sizes, all_rows, GROUPS):
        if groups <= rows:
            yield Case(processor, rows, vocab_size, groups)
        if 1 < groups < rows:
            yield Case(processor, rows, vocab_size, groups, interleaved=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print as it goes."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    parser.add_argument("--without-sglang", action="store_true", help="nothing is downloaded")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    peer, processors = None, [ForbidTokens]
    if not options.without_sglang:
        sys.path.insert(0, str(PEERS))
        import sglang_peer  # type: ignore[import-not-found, unused-ignore]

        peer = sglang_peer.load()
        processors.append(peer.custom_logit_processor.DisallowedTokensLogitsProcessor)
    all_cases = cases(processors, options.rows, options.vocab_sizes)
    report((each for case in all_cases for each in measure(case, peer, options.turns)), options.json)


if __name__ == "__main__":
    main()
