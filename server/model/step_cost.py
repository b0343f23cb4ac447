"""Time of a forward pass by its number of tokens, measured when the engine starts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import torch

from .model_runner import Chunk, ModelRunner

_ROUNDS = 3
"""Measurements of each number of tokens. The fastest counts: other work on the machine disturbed it least."""
_NUMBERS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 65, 129)
"""Measured numbers of tokens. Dense where matrix libraries switch kernels: on a CPU, two tokens may be slower than
five."""


class StepCost:
    """Time of a forward pass, interpolated between the measured numbers of tokens.

    Args:
        seconds: number of tokens → seconds; at least two entries.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._numbers = sorted(seconds)
        self._seconds = [seconds[number] for number in self._numbers]

    def __call__(self, num_tokens: int) -> float:
        """Return the seconds of a pass, on the line through the two nearest measurements."""
        right = min(max(bisect_left(self._numbers, num_tokens), 1), len(self._numbers) - 1)
        (x0, x1), (y0, y1) = self._numbers[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return max(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0), min(y0, y1))


def measure_step_cost(runner: ModelRunner, most_tokens: int) -> StepCost:
    """Measure forward passes of one sequence. Takes as long as about 100 steps; no other pass may run meanwhile.

    Args:
        runner: runs the passes.
        most_tokens: largest number of tokens to measure.
    """
    return StepCost(measure_passes(runner, [number for number in _NUMBERS if number <= most_tokens]))


def measure_passes(runner: ModelRunner, numbers: Iterable[int]) -> dict[int, float]:
    """Measure forward passes of one sequence, each three times. No other pass may run meanwhile.

    Args:
        runner: runs the passes.
        numbers: numbers of tokens; those that exceed the length of a sequence are left out.

    Returns:
        Seconds by number of tokens.
    """
    numbers = [number for number in numbers if number <= runner.cache.shape.max_len]
    seconds: dict[int, float] = {}
    for _ in range(_ROUNDS):
        for number in numbers:
            start = time.perf_counter()
            runner.logits([Chunk(0, 0, [0] * number)], [], list(range(number)))
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            took = time.perf_counter() - start
            seconds[number] = min(took, seconds.get(number, took))
    return seconds
