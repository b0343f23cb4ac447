"""Calls of groups whose failure is a fault of the group's rows alone.

What comes back from a processor is data of a client. If the server fails on it, which is an error of the server, a step
must not end the requests of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from logitship.client.errors import ProcessorFault

from .executor import LocalGroup, RunOutcome
from .internal_faults import attempt

if TYPE_CHECKING:
    import torch

    from .executor import CollectEdits, Run
    from .processor_groups import ProcessorGroup

T = TypeVar("T")


def begin(group: ProcessorGroup, logits: torch.Tensor, seconds_used: float) -> GuardedRun:
    """Begin a call of a group that runs elsewhere, see `ExecutorGroup.begin`."""
    executor_group = group.executor_group
    assert not isinstance(executor_group, LocalGroup)
    return GuardedRun(group, attempt(group.processor, lambda: executor_group.begin(logits, seconds_used)))


def call(group: ProcessorGroup, logits: torch.Tensor) -> RunOutcome:
    """Call the processor of a group, and wait until the call has ended, see `LocalGroup.call`."""
    outcome = attempt(group.processor, lambda: group.executor_group.call(logits))
    return failed(group, outcome) if isinstance(outcome, ProcessorFault) else outcome


def failed(group: ProcessorGroup, fault: ProcessorFault) -> RunOutcome:
    """Return the outcome of a call with a fault of all rows."""
    return RunOutcome(0.0, dict.fromkeys(range(len(group.rows)), fault))


class GuardedRun:
    """A `Run` that raises nothing: if the server fails in it, it has ended, with a fault of all rows.

    Args:
        group: the rows of the call.
        run: the call; a fault if it could not begin.

    Attributes:
        group: the rows of the call.
    """

    def __init__(self, group: ProcessorGroup, run: Run | ProcessorFault) -> None:
        self.group = group
        self._run = run

    def _attempt(self, function: Callable[[Run], T], after_failure: T) -> T:
        """Call a function with the run. Return `after_failure` if it fails now, or has failed before."""
        run = self._run
        if isinstance(run, ProcessorFault):
            return after_failure
        result = attempt(self.group.processor, lambda: function(run))
        if isinstance(result, ProcessorFault):
            self._run = result
            return after_failure
        return result

    def needs_logits(self) -> bool:
        """Return whether the call still needs its logits; False if the server failed in it."""
        return self._attempt(lambda run: run.needs_logits(), False)

    def provide(self, logits: torch.Tensor) -> None:
        """Give the call its logits."""
        self._attempt(lambda run: run.provide(logits), None)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the call. Return whether it has ended."""
        return self._attempt(lambda run: run.wait(timeout), True)

    def lower_priority(self) -> None:
        """Continue the call at the lowest priority."""
        self._attempt(lambda run: run.lower_priority(), None)

    def defer(self, logits: torch.Tensor) -> None:
        """Continue the call after its step, which no longer waits for it."""
        self._attempt(lambda run: run.defer(logits), None)

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        """Wait for the end of the call, and return its outcome: a fault of all rows if the server failed in it."""
        outcome = self._attempt(lambda run: run.finish(collect), None)
        if outcome is None:
            assert isinstance(self._run, ProcessorFault)
            return failed(self.group, self._run)
        return outcome
