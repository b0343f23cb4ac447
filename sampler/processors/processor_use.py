"""A request's use of a processor: parameters, call counts and its row at the executor."""

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
    """Steps and time of the calls of a processor, per row.

    Attributes:
        steps: decoding steps to which the processor was applied.
        seconds: time spent: the duration of each call divided by its number of rows.
    """

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        """Add a call, or the calls of another count."""
        self.steps += steps
        self.seconds += seconds


@dataclass(eq=False)
class ProcessorUse:
    """One request's use of one processor. Not shared between requests: it counts this request's calls.

    Attributes:
        processor: the processor.
        params: the request's parameters for it (SGLang's `custom_params`).
        rid: request id.
        prepared: result of an installed processor's `prepare` at admission; None for other processors.
        own_count: calls so far, without those in `shared_counts`.
        shared_counts: counts of the groups that it has been in since the batch changed; each counts for all members.
        executor_row: the sequence at the processor's executor; None until it has a row of the batch.
        forked_row: the same for a sequence that was forked from another one and has no row of the batch yet.
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
        """Return the use of another sequence that continues from this one's history, see `ExecutorRow.fork`.

        This sequence must have a row. The other one gets a row next, or is closed by `drop_fork`.

        Raises:
            ProcessorFault: the processor's state of the sequence cannot be copied.
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
        """Close a fork that will never get a row of the batch. Does nothing if it has one, or is no fork."""
        if self.forked_row is not None:
            self.forked_row.close()
            self.forked_row = None

    def merge_shared_counts(self) -> None:
        """Add the shared counts to `own_count`: the batch has changed, and so have the groups."""
        if self.shared_counts:
            self.own_count, self.shared_counts = self.count, []

    @property
    def name(self) -> str:
        """Name of the processor."""
        return self.processor.name

    @property
    def receipt(self) -> Receipt:
        """Receipt for the response."""
        count = self.count
        return Receipt(self.processor.digest, self.processor.name, count.steps, round(count.seconds * 1e3, 3))

    @property
    def count(self) -> CallCount:
        """Copy of the counts of all calls so far."""
        count = CallCount()
        for each in (self.own_count, *self.shared_counts):
            count.add(each.steps, each.seconds)
        return count


def uses_of(params: SamplingParams) -> tuple[ProcessorUse, ...]:
    """Return the uses attached to a request's sampling parameters, which know them as `AttachedProcessor`s alone."""
    return cast("tuple[ProcessorUse, ...]", params.processors)


def in_run_order(uses: Iterable[ProcessorUse]) -> list[ProcessorUse]:
    """Sort a request's processors as they run: masks first. The masks run again after the others."""
    return sorted(uses, key=lambda use: not use.processor.is_mask)
