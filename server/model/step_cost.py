"""How long a forward pass takes, by its number of tokens: measured when the engine starts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping

import torch

from .model_runner import Chunk, ModelRunner

_ROUNDS = 3
"""Each number is measured so often; the fastest counts, which other work on the machine disturbed least."""
_NUMBERS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 65, 129)
"""Close together where matrix libraries change their ways: on a CPU, two or three tokens may take longer than five."""


class StepCost:
    """The time of a pass, between and beyond the numbers of tokens that were measured.

    Args:
        seconds: number of tokens → time; at least two.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._numbers = sorted(seconds)
        self._seconds = [seconds[number] for number in self._numbers]

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a pass, on the straight line through the two nearest measurements."""
        right = min(max(bisect_left(self._numbers, num_tokens), 1), len(self._numbers) - 1)
        (x0, x1), (y0, y1) = self._numbers[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0), min(y0, y1))


def measure_step_cost(runner: ModelRunner, most_tokens: int) -> StepCost:
    """Time passes of one sequence. Takes as long as some 100 steps; nothing else may run.

    Args:
        most_tokens: of any step.
    """
    numbers = [number for number in _NUMBERS if number <= min(most_tokens, runner.cache.shape.max_len)]
    seconds: dict[int, float] = {}
    for _ in range(_ROUNDS):
        for number in numbers:
            began = time.perf_counter()
            runner.forward([Chunk(0, 0, [0] * number)], [], list(range(number)))
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            took = time.perf_counter() - began
            seconds[number] = min(took, seconds.get(number, took))
    return StepCost(seconds)
