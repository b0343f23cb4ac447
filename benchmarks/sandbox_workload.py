"""Workload of `sandbox_step.py` and `sandbox_throughput.py`: processors, parameters of their rows, and steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ZygoteProcess

NUM_BANNED = 100
NUM_TRANSITIONS = 50

BODIES = {
    "identity": "return logits",
    "ban": """
        for row, params in enumerate(custom_param_list):
            logits[row, params["banned"]] = -float("inf")
        return logits
    """,
    "lookup": """
        for row, params in enumerate(custom_param_list):
            last = params["__req__"].output_ids[-1:]
            logits[row, params["next"].get(str(last), 0)] += 2.0
        return logits
    """,
    "softmax": "return torch.log_softmax(logits, dim=-1)",
}
"""Bodies of the processors. They edit `logits`, given one dict per row, as `request_params` makes it."""

SOURCE = """
import torch
from logitship import CustomLogitProcessor

class Processor{number}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {body}
"""

Step = Callable[[], None]


def source(body: str, number: int = 0) -> SourceProcessor:
    """Return a processor string with a body of `BODIES`; a different class for each number."""
    return SourceProcessor(SOURCE.format(body=BODIES[body].strip(), number=number), f"Processor{number}")


def request_params(body: str, row: int, vocab_size: int) -> dict[str, Any]:
    """Return the parameters of a request, different for each row."""
    tokens = torch.randint(vocab_size, (NUM_BANNED,), generator=torch.Generator().manual_seed(row)).tolist()
    if body == "ban":
        return {"banned": tokens}
    if body == "lookup":
        return {"next": {str([token]): tokens[token] for token in range(NUM_TRANSITIONS)}}
    return {}


class Model:
    """Computes logits as a server does, with matrix products that displace most other data from the caches.

    Args:
        logits: float32 [rows, vocab], written by each call.
        seconds: that a call computes; 0 makes it do nothing.
    """

    def __init__(self, logits: torch.Tensor, seconds: float) -> None:
        rows, vocab_size = logits.shape
        self._logits = logits
        self._seconds = seconds
        self._hidden = torch.randn(rows, 1024)
        self._weights = [torch.randn(1024, 1024) for _ in range(16 if seconds else 0)]
        self._head = torch.randn(64, vocab_size if seconds else 0)

    def __call__(self) -> None:
        """Compute."""
        if not self._seconds:
            return
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            for weights in self._weights:
                torch.mm(self._hidden, weights)
        torch.mm(self._hidden[:, :64], self._head, out=self._logits)


def shipped_step(body: str, logits: torch.Tensor, processors: Sequence[LoadedProcessor], history: int) -> Step:
    """Return the shipped processors' part of a step of the engine, in which each row gains a token.

    Args:
        body: of the processors, a key of `BODIES`.
        logits: float32 [rows, vocab], edited in place.
        processors: each edits as many rows as the others.
        history: output tokens that the rows begin with.
    """
    rows, vocab_size = logits.shape
    shipped = ShippedProcessors(None, logits.device, False, model=ModelView(vocab_size, frozenset({0}), None))
    outputs = [[token % NUM_TRANSITIONS for token in range(history)] for _ in range(rows)]
    added = []
    for row, output in enumerate(outputs):
        use = ProcessorUse(processors[row * len(processors) // rows], request_params(body, row, vocab_size), str(row))
        added.append((row, SamplingParams(processors=(use,)), [0], output))
    shipped.update_state(BatchUpdate(rows, [], added, []))

    def step() -> None:
        for output in outputs:
            output.append(len(output) % NUM_TRANSITIONS)
        shipped.update_state(None)
        shipped.apply(logits)
        if faults := shipped.take_faults():
            raise SystemExit(f"a processor failed: {faults[0][1]}")

    return step


def copies_step(logits: torch.Tensor) -> Step:
    """Return a step of two plain copies of the rows, there and back."""
    there = torch.empty_like(logits)

    def step() -> None:
        there.copy_(logits)
        logits.copy_(there)

    return step


@contextmanager
def sandbox_executor(max_rows: int, vocab_size: int) -> Iterator[SandboxExecutor]:
    """Start a zygote and an executor; end both at the end of the block."""
    zygote = ZygoteProcess(
        names="logitship.builtin_processors.sglang_names:SGLANG_NAMES", max_rows=max_rows, memory_limit=1 << 30
    )
    try:
        zygote.start()
        zygote.set_up(ModelView(vocab_size, frozenset({0}), None))
        executor = SandboxExecutor(
            zygote,
            SandboxLimits(cpu_time=2.0, step_timeout=10.0, first_step_timeout=10.0, load_timeout=10.0),
            max_rows,
            vocab_size,
        )
    except BaseException:
        zygote.close()
        raise
    try:
        yield executor
    finally:
        executor.close()
