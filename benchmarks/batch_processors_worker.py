"""One side of `batch_processors.py`: times the built-in batch processors of logitship or of vLLM while a batch churns.

    python batch_processors_worker.py logitship|vllm

Where vLLM is timed it imports nothing of logitship, so that any environment with vLLM will do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from worker_process import serve

MODULES = {
    "logitship": (
        "logitship.sampler.batch_processors.interface",
        "logitship.sampler.sampling_params",
        dict.fromkeys(("min_p", "logit_bias", "min_tokens"), "logitship.builtin_processors.parameter_processors"),
    ),
    "vllm": (
        "vllm.v1.sample.logits_processor.interface",
        "vllm.sampling_params",
        dict.fromkeys(("min_p", "logit_bias", "min_tokens"), "vllm.v1.sample.logits_processor.builtin"),
    ),
}
"""Modules of each side: the contract, the sampling parameters, and the processors."""

CLASSES = {
    "min_p": "MinPLogitsProcessor",
    "logit_bias": "LogitBiasLogitsProcessor",
    "min_tokens": "MinTokensLogitsProcessor",
}


class Step(TypedDict):
    """Change of the batch before a step.

    Attributes:
        size: number of rows after the change.
        removed: rows that were freed.
        added: (row, parameters of `SamplingParams`).
        moved: (row, row, name of the direction).
    """

    size: int
    removed: list[int]
    added: list[tuple[int, dict[str, Any]]]
    moved: list[tuple[int, int, str]]


class Command(TypedDict):
    """Case to time.

    Attributes:
        vocab_size: width of the logits.
        rows: maximum number of rows of the batch.
        processors: names in `CLASSES`.
        steps: change of the batch before each step; None: no change. Each step adds a token to every row.
    """

    vocab_size: int
    rows: int
    processors: list[str]
    steps: list[Step | None]


class Side:
    """Classes of one side."""

    def __init__(self, name: str) -> None:
        interface, params, processors = MODULES[name]
        self._interface: Any = __import__(interface, fromlist=["BatchUpdate"])
        self._sampling_params: Any = __import__(params, fromlist=["SamplingParams"]).SamplingParams
        self._modules = {name: __import__(module, fromlist=[CLASSES[name]]) for name, module in processors.items()}

    def processor(self, name: str, rows: int) -> Any:
        """Make a processor on the CPU."""
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
        return getattr(self._modules[name], CLASSES[name])(config, torch.device("cpu"), False)

    def update(self, step: Step | None, outputs: list[list[int]]) -> Any:
        """Make the `BatchUpdate` of a step, and apply it to the live outputs of the rows."""
        if step is None:
            return None
        added = []
        for row, params in step["added"]:
            output: list[int] = []
            biases = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
            added.append((row, self._sampling_params(**{**params, "logit_bias": biases}), [0], output))
            outputs[row] = output
        directions = self._interface.MoveDirectionality
        for source, target, _ in step["moved"]:
            outputs[source], outputs[target] = outputs[target], outputs[source]
        moved = [(source, target, directions[direction]) for source, target, direction in step["moved"]]
        return self._interface.BatchUpdate(step["size"], step["removed"], added, moved)


def seconds_a_step(side: Side, command: Command) -> float:
    """Return the mean time of `update_state` and `apply` in the life of a batch, all processors together.

    Neither the creation of the updates and logits nor the first half of the steps is timed.
    """
    processors = [side.processor(name, command["rows"]) for name in command["processors"]]
    outputs: list[list[int]] = [[] for _ in range(command["rows"])]
    fresh = torch.randn(command["rows"], command["vocab_size"], generator=torch.Generator().manual_seed(0)) * 3
    logits = torch.empty_like(fresh)
    taken, size = [], 0
    for step in command["steps"]:
        update = side.update(step, outputs)
        size = size if step is None else step["size"]
        rows = logits[:size].copy_(fresh[:size])
        began = time.perf_counter()
        for processor in processors:
            processor.update_state(update)
            rows = processor.apply(rows)
        taken.append(time.perf_counter() - began)
        for output in outputs[:size]:
            output.append(1)
    timed = taken[len(taken) // 2 :]
    return sum(timed) / len(timed)


def main() -> None:
    """Report the version that runs here, then answer commands."""
    name = sys.argv[1]

    def start() -> tuple[dict[str, str], Callable[[Command], float]]:
        version = __import__(name).__version__
        side = Side(name)

        def answer(command: Command) -> float:
            with torch.inference_mode():
                return seconds_a_step(side, command)

        return {"version": version, "torch": torch.__version__}, answer

    serve(start)


if __name__ == "__main__":
    main()
