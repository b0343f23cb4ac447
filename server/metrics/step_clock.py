"""Where the time of a step goes."""

from __future__ import annotations

import time
from types import TracebackType


class Phase:
    """`with phase:` counts the time inside for this phase, less that of the phases inside it.

    Attributes:
        name: for people and metrics.
        seconds: counted so far in this step.
    """

    __slots__ = ("_clock", "name", "seconds")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock = clock
        self.name = name
        self.seconds = 0.0

    def __enter__(self) -> None:
        """Begin, and let the phase around it rest."""
        self._clock.enter(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End, and let the phase around it go on."""
        self._clock.leave()


class StepClock:
    """The phases of a step. For the engine's thread alone.

    On a GPU, where the model's work is queued, the time of `forward` shows in the phase that first waits for a result.

    Attributes:
        schedule: who computes what.
        batch_update: rows come, go and move, and everybody who keeps state by row is told.
        forward: the model.
        sample: from logits to tokens, without `processors`.
        processors: the shipped and the built-in processors of requests.
        deliver: detokenizing, stop strings, ends of sequences, and handing over what the step gave.
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
        """All of them, in the order of a step."""
        return (self.schedule, self.batch_update, self.forward, self.sample, self.processors, self.deliver)

    def enter(self, phase: Phase) -> None:
        """Begin a phase inside the one that runs."""
        now = time.perf_counter()
        if self._running:
            self._running[-1].seconds += now - self._since
        self._running.append(phase)
        self._since = now

    def leave(self) -> None:
        """End the phase that runs."""
        now = time.perf_counter()
        self._running.pop().seconds += now - self._since
        self._since = now

    def reset(self) -> None:
        """Begin the next step."""
        for phase in self.phases:
            phase.seconds = 0.0
        self.num_rows = 0
