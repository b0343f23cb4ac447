"""Times the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.processors.shipped_processors import ShippedProcessors


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

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `ShippedProcessors.apply`."""
        with self._clock.processors:
            return super().apply(logits)

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """See `ShippedProcessors.apply_with_spec_decode`."""
        with self._clock.processors:
            return super().apply_with_spec_decode(logits, num_draft_tokens)
