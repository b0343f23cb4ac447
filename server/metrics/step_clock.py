"""Times the phases of a step, and models how the time of a step grows with its sequences."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.processors.shipped_processors import ShippedProcessors

_DECAY = 1 - 1 / 64
"""Factor by which the weight of an observation shrinks with each later one."""

_MIN_WEIGHT = 1.0
"""Minimum weight of the observations of a size, however old they are."""

_MIN_SPREAD = 0.05
"""Minimum coefficient of variation of the observed positions for fitting their cost."""


class Phase:
    """A context manager that adds the time inside to this phase, without the time of nested phases.

    Attributes:
        name: label in metrics.
        seconds: time in this step so far.
    """

    __slots__ = ("_clock", "name", "seconds")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self.name = name
        self.seconds = 0.0

    def __enter__(self) -> None:
        """Start, and pause the enclosing phase."""
        self._clock.enter(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop, and resume the enclosing phase."""
        self._clock.exit()


class StepClock:
    """The phases of a step. Engine thread only.

    On a GPU, where kernels run asynchronously, the time of `forward` shows in the phase that first waits for a result.

    Attributes:
        schedule: planning the step.
        batch_update: adding, removing and moving rows, and updating all state that is kept by row.
        forward: the model.
        sample: from logits to tokens, without `processors`.
        processors: the shipped and built-in processors of requests.
        deliver: detokenizing, stop strings, finishing sequences, and delivering chunks.
        num_rows: rows of the batch in this step.
    """

    def __init__(self) -> None:
        self.schedule = Phase(self, "schedule")
        self.batch_update = Phase(self, "batch_update")
        self.forward = Phase(self, "forward")
        self.sample = Phase(self, "sample")
        self.processors = Phase(self, "processors")
        self.deliver = Phase(self, "deliver")
        self.num_rows = 0
        self._running: list[Phase] = []
        self._since = 0.0

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases, in the order of a step."""
        return (self.schedule, self.batch_update, self.forward, self.sample, self.processors, self.deliver)

    @property
    def seconds_without_processors(self) -> float:
        """Time of the step so far, without the phase `processors`."""
        return sum(phase.seconds for phase in self.phases) - self.processors.seconds

    def enter(self, phase: Phase) -> None:
        """Start a phase inside the current one."""
        now = time.perf_counter()
        if self._running:
            self._running[-1].seconds += now - self._since
        self._running.append(phase)
        self._since = now

    def exit(self) -> None:
        """Stop the current phase."""
        now = time.perf_counter()
        self._running.pop().seconds += now - self._since
        self._since = now

    def reset(self) -> None:
        """Reset for the next step."""
        for phase in self.phases:
            phase.seconds = 0.0
        self.num_rows = 0


class TimedProcessors(ShippedProcessors):
    """`ShippedProcessors`, timed as the step's phase `processors`."""

    def __init__(self, *args: Any, clock: StepClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = clock

    def begin(self) -> None:
        """See `ShippedProcessors.begin`."""
        with self._clock.processors:
            super().begin()

    def restrict(self, allowed: Mapping[int, AllowedTokens]) -> None:
        """See `ShippedProcessors.restrict`."""
        with self._clock.processors:
            super().restrict(allowed)

    def abandon(self, kept: Collection[int] = ()) -> None:
        """See `ShippedProcessors.abandon`."""
        with self._clock.processors:
            super().abandon(kept)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `ShippedProcessors.apply`."""
        with self._clock.processors:
            return super().apply(logits)

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `ShippedProcessors.apply_with_spec_decode`."""
        with self._clock.processors:
            return super().apply_with_spec_decode(logits, num_draft_tokens)


@dataclass
class _MeanStep:
    """The mean of the observed steps of about one size.

    Attributes:
        weight: how many observations it counts as.
    """

    positions: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def fade(self) -> None:
        self.weight = max(_MIN_WEIGHT, self.weight * _DECAY)

    def add(self, positions: int, seconds: float) -> None:
        self.weight += 1
        self.positions += (positions - self.positions) / self.weight
        self.seconds += (seconds - self.seconds) / self.weight


@dataclass
class StepTime:
    """Linear model of the time of a step without prompts: a cost for each position, and a fixed part.

    Fitted by least squares to the mean step of each size; sizes are powers of two of positions. Older steps lose weight
    exponentially, but no size drops below `_MIN_WEIGHT`: after an hour of small steps, the cost of a position would be
    fitted to noise.

    Attributes:
        per_position: seconds for each position that the step attends to; 0 until steps with different numbers were
            observed.
        base: seconds of a step without any.
    """

    per_position: float = 0.0
    base: float = 0.0
    _sizes: dict[int, _MeanStep] = field(default_factory=dict)

    def observe(self, positions: int, seconds: float) -> None:
        """Add a step."""
        for step in self._sizes.values():
            step.fade()
        self._sizes.setdefault(positions.bit_length(), _MeanStep()).add(positions, seconds)
        self._fit([*self._sizes.values()])

    def _fit(self, steps: list[_MeanStep]) -> None:
        weight = sum(step.weight for step in steps)
        positions = sum(step.weight * step.positions for step in steps) / weight
        seconds = sum(step.weight * step.seconds for step in steps) / weight
        variance = sum(step.weight * (step.positions - positions) ** 2 for step in steps) / weight
        if variance > (_MIN_SPREAD * positions) ** 2:
            covariance = sum(step.weight * (step.positions - positions) * step.seconds for step in steps) / weight
            # Not more than all of the time: others may have slowed the long steps down.
            self.per_position = min(max(0.0, covariance / variance), seconds / positions)
        self.base = max(0.0, seconds - self.per_position * positions)

    def expected(self, positions: int) -> float:
        """Return the seconds that a step probably takes."""
        return self.base + self.per_position * positions
