"""Calls that no token needs, and their costs. Whole engines are in `tests/server/engine/test_forced_tokens.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.processors.deferred_calls import DeferredCalls
from logitship.sampler.processors.early_calls import EarlyCalls
from logitship.sampler.processors.executor import CollectEdits, RunOutcome
from logitship.sampler.processors.processor_groups import GroupStage, ProcessorGroup

VOCAB = 8


@dataclass
class Patience:
    """Fake of `StepPatience` that waits equally long for each call.

    Attributes:
        seconds: the wait for each call.
        charged: charged seconds of the calls that have ended.
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
    """A call that uses the values of its logits unless `is_over` is set before, and ends once it is."""

    is_over = False
    num_finished = 0
    is_deferred = False
    logits: torch.Tensor | None = None

    def needs_logits(self) -> bool:
        return not self.is_over

    def provide(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def wait(self, timeout: float) -> bool:
        return self.is_over

    def lower_priority(self) -> None:
        pass

    def defer(self, logits: torch.Tensor) -> None:
        self.is_deferred = True

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        self.num_finished += 1
        if collect is not None:
            collect([0, 1], ())
        return RunOutcome(seconds=1.0, charged=0.5, occupied=0.25)


class Member:
    """A request's processor, as far as `EarlyCalls` uses it."""

    output_token_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class Group:
    """Rows of a processor, as far as `EarlyCalls` and `DeferredCalls` use them."""

    run: Any
    rows: list[int]

    def __post_init__(self) -> None:
        self.processor = SimpleNamespace(tenant="a", group_name="x")
        self.members = [Member() for _ in self.rows]
        self.executor_group = SimpleNamespace(promise=lambda: self.run)

    def count(self, outcome: RunOutcome) -> None:
        pass

    def part(self, *places: int) -> ProcessorGroup:
        """Return some of the rows."""
        part = Group(self.run, [self.rows[place] for place in places])
        part.members = [self.members[place] for place in places]
        return cast(ProcessorGroup, part)


def begun(calls: DeferredCalls, *rows: int) -> tuple[EarlyCalls, ReadingRun, Group]:
    """Begin a call for some rows."""
    run, early = ReadingRun(), EarlyCalls(calls, VOCAB)
    group = Group(run, [*rows])
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


def test_call_of_rows_that_go_on_costs_what_it_took() -> None:
    """The sequences of its other rows have ended."""
    early, run, group = begun(DeferredCalls(), 0, 1)
    part = early.take(group.part(1))
    assert part is not None
    assert part.needs_logits()
    part.provide(torch.ones(1, VOCAB))
    run.is_over = True
    assert part.wait(math.inf)
    outcome = part.finish()
    assert (outcome.seconds, outcome.charged, outcome.occupied) == (0.5, 0.5, 0.25)
    assert run.num_finished == 1


def test_call_that_ends_early_costs_its_rows_once() -> None:
    early, run, group = begun(DeferredCalls(), 0, 1)
    run.is_over = True
    costs = []
    for place in range(2):
        part = early.take(group.part(place))
        assert part is not None
        assert not part.needs_logits()
        outcome = part.finish(lambda places, edits: None)
        costs.append((outcome.charged, outcome.occupied))
    assert costs == [(0.5, 0.25), (0.0, 0.0)]
    assert run.num_finished == 1


class EditingRun(ReadingRun):
    """A call that has ended, with the edits of a log."""

    is_over = True

    def __init__(self, log: EditLog) -> None:
        self._log = log

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        assert collect is not None
        collect(range(self._log.num_rows), self._log.edits)
        return RunOutcome(seconds=1.0)


def test_part_of_a_call_whose_rows_depend_on_each_other() -> None:
    """The other sequence has ended since the call: its row is zero, as in a call that has not ended."""
    log = EditLog(2, VOCAB)
    saved = log.save([1, VOCAB + 1])
    log.restore([VOCAB + 2, 2], saved)
    early, group = EarlyCalls(DeferredCalls(), VOCAB), Group(EditingRun(log), [0, 1])
    early.begin(cast(GroupStage, SimpleNamespace(groups=[group])))
    part = early.take(group.part(1))
    assert part is not None
    assert part.needs_logits()
    logits = torch.arange(1.0, VOCAB + 1)[None]
    part.provide(logits)
    outcome = part.finish(lambda places, edits: None)
    assert (outcome.faults, outcome.seconds) == ({}, 0.5)
    assert logits.tolist() == [[1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0]]


def test_call_whose_rows_depend_on_each_other_is_taken_whole() -> None:
    log = EditLog(2, VOCAB)
    log.restore([VOCAB + 2], log.save([1]))
    early, group = EarlyCalls(DeferredCalls(), VOCAB), Group(EditingRun(log), [0, 1])
    early.begin(cast(GroupStage, SimpleNamespace(groups=[group])))
    whole = early.take(cast(ProcessorGroup, group))
    assert whole is not None
    assert not whole.needs_logits()
    collected: list[Any] = []
    whole.finish(lambda *edits: collected.append(edits))
    assert collected == [(range(2), log.edits)]
