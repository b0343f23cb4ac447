"""Calls that no token needs, and their costs. Whole engines are in `tests/server/engine/test_forced_tokens.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.early_calls import EarlyCalls
from logitship.sampler.processors.executor import RunOutcome
from logitship.sampler.processors.processor_groups import GroupStage, ProcessorGroup

VOCAB = 8


@dataclass
class Patience:
    """Waits for each call equally long.

    Attributes:
        seconds: how long.
        charged: seconds of the calls that have ended.
    """

    seconds: float = math.inf
    charged: list[float] = field(default_factory=list)

    @property
    def is_limited(self) -> bool:
        return self.seconds < math.inf

    def left(self, tenant: str, num_rows: int = 1) -> float:
        return self.seconds

    def charge(self, tenant: str, seconds: float) -> None:
        self.charged.append(seconds)


class ReadingRun:
    """A call that uses the values of its logits, and then ends when `is_over` is set, or is awaited without a limit."""

    is_over = False
    num_finished = 0
    is_deferred = False
    logits: torch.Tensor | None = None

    def needs_logits(self) -> bool:
        return True

    def provide(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def wait(self, timeout: float) -> bool:
        return self.is_over

    def lower_priority(self) -> None:
        pass

    def defer(self, logits: torch.Tensor) -> None:
        self.is_deferred = True

    def finish(self) -> RunOutcome:
        self.num_finished += 1
        return RunOutcome(seconds=1.0, charged=0.5, occupied=0.25)


@dataclass(eq=False)
class Group:
    """Rows of a processor, as far as `EarlyCalls` and `DeferredCalls` use them."""

    run: Any
    rows: list[int]

    def __post_init__(self) -> None:
        self.processor = SimpleNamespace(tenant="a", group_name="x")
        self.members = [SimpleNamespace(use=object(), output_token_ids=[]) for _ in self.rows]
        self.executor_group = SimpleNamespace(promise=lambda: self.run)

    def count(self, outcome: RunOutcome) -> None:
        pass


def begun(calls: DeferredCalls, *rows: int) -> tuple[EarlyCalls, ReadingRun, ProcessorGroup]:
    """Begin a call for some rows."""
    run, early = ReadingRun(), EarlyCalls(calls, VOCAB)
    group = cast(ProcessorGroup, Group(run, [*rows]))
    early.begin(cast(GroupStage, SimpleNamespace(groups=[group])))
    return early, run, group


def test_abandoned_call_is_waited_for_and_charged() -> None:
    patience = Patience()
    early, run, _ = begun(DeferredCalls(patience), 0)
    early.abandon()
    assert run.logits is not None
    assert run.logits.tolist() == [[0.0] * VOCAB]
    assert (run.num_finished, run.is_deferred, patience.charged) == (1, False, [0.25])
    assert not early.is_busy("x")


def test_abandoned_call_that_takes_long_holds_up_no_step() -> None:
    """Its processor is not called again before it has ended."""
    calls = DeferredCalls(Patience(seconds=0.01))
    early, run, _ = begun(calls, 0)
    early.abandon()
    assert (run.num_finished, run.is_deferred) == (0, True)
    assert (calls.is_busy("x"), early.is_busy("x")) == (True, False)
    run.is_over = True
    calls.collect()
    assert (run.num_finished, calls.is_busy("x"), calls.has_saved) == (1, False, False)
