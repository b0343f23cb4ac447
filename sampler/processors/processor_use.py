"""A request's use of a processor: parameters, call counts and the row at the executor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from logitship.client.records import Receipt

if TYPE_CHECKING:
    from logitship.sampler.sampling_params import SamplingParams

    from .executor import ExecutorRow, LoadedProcessor


@dataclass(eq=False)
class CallCount:
    """What a group's calls come to for each of its rows: one sum for all of them.

    Attributes:
        steps: decoding steps to which the processor was applied.
        seconds: time spent: a call's time divided by its rows.
    """

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        """Count a call, or the calls of another count."""
        self.steps += steps
        self.seconds += seconds


@dataclass(eq=False)
class ProcessorUse:
    """One request's use of one processor. Not shared: the counters are this request's.

    Attributes:
        params: the request's parameters for it, `custom_params` in SGLang's words.
        rid: the request id.
        prepared: what an installed processor made of `params` at admission; None for all others.
        own_count: its calls so far, without those in `shared_counts`.
        shared_counts: those of the groups that it is or was in since the batch changed, which count for all members.
        executor_row: the sequence at the processor's executor, from when it gets a row of the batch.
        forked_row: the same before, of a sequence that goes on from another one's history.
    """

    processor: LoadedProcessor
    params: dict[str, Any]
    rid: str
    prepared: Any = None
    own_count: CallCount = field(default_factory=CallCount)
    shared_counts: list[CallCount] = field(default_factory=list)
    executor_row: ExecutorRow | None = None
    forked_row: ExecutorRow | None = None

    def fork(self, output_token_ids: list[int]) -> ProcessorUse:
        """The use by another sequence, which goes on from this one's history: see `ExecutorRow.fork`.

        This one has a row. The other one gets a row next, or is closed by `drop_fork`.

        Raises:
            ProcessorFault: what the processor keeps of the sequence cannot be copied.
        """
        assert self.executor_row is not None
        return replace(
            self,
            own_count=self.count,
            shared_counts=[],
            executor_row=None,
            forked_row=self.executor_row.fork(output_token_ids),
        )

    def drop_fork(self) -> None:
        """Close what `fork` made, if it has not got a row: it never will. Harmless otherwise."""
        if self.forked_row is not None:
            self.forked_row.close()
            self.forked_row = None

    def merge_shared_counts(self) -> None:
        """Take over what was counted together with others: the batch has changed, and with it the groups."""
        if self.shared_counts:
            self.own_count, self.shared_counts = self.count, []

    @property
    def name(self) -> str:
        """The processor's name."""
        return self.processor.name

    @property
    def receipt(self) -> Receipt:
        """What the response says of it."""
        count = self.count
        return Receipt(self.processor.digest, self.processor.name, count.steps, round(count.seconds * 1e3, 3))

    @property
    def count(self) -> CallCount:
        """Its calls so far, as a copy."""
        count = CallCount()
        for each in (self.own_count, *self.shared_counts):
            count.add(each.steps, each.seconds)
        return count


def uses_of(params: SamplingParams) -> tuple[ProcessorUse, ...]:
    """Return the uses attached to a request's sampling parameters, which know them as `AttachedProcessor`s alone."""
    return cast("tuple[ProcessorUse, ...]", params.processors)


def in_run_order(uses: Iterable[ProcessorUse]) -> list[ProcessorUse]:
    """A request's processors as they run: masks first. The masks run once more, after the others."""
    return sorted(uses, key=lambda use: not use.processor.is_mask)
