"""Requests' uses of processors, and the groups of rows that share a processor.

Groups are rebuilt only when the batch changes. The batch's rows are reordered so that the rows of each processor are
adjacent (`group_key`): adjacent rows are a view of the logits; scattered rows have to be gathered and written back.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from logitship.client.records import Receipt
from logitship.sampler.edits.edit_operations import num_touched
from logitship.sampler.edits.merged_edits import apply_separately

from .executor import LocalGroup
from .internal_faults import internal_fault

if TYPE_CHECKING:
    from logitship.client.errors import ProcessorFault
    from logitship.sampler.edits.edit_operations import GroupEdits
    from logitship.sampler.sampling_params import SamplingParams

    from .executor import CollectEdits, ExecutorRow, LoadedProcessor, LogitsUse, RunOutcome


@dataclass(eq=False)
class CallCount:
    """Steps and time of the calls of a processor, per row.

    Attributes:
        steps: decoding steps to which the processor was applied.
        seconds: time spent: the duration of each call divided by its number of rows.
        forced_steps: those of the steps that needed no forward pass of their own.
    """

    steps: int = 0
    seconds: float = 0.0
    forced_steps: int = 0

    def add(self, steps: int, seconds: float, forced_steps: int = 0) -> None:
        """Add a call, or the calls of another count."""
        self.steps += steps
        self.seconds += seconds
        self.forced_steps += forced_steps


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
        before: names of the request's fields and earlier processors that may have forbidden tokens before this one.
        is_last: True if nothing of the same request edits the row's logits afterwards.
        output_token_ids: the sequence's live output list.
        forked_row: the same for a sequence that was forked from another one and has no row of the batch yet.
        printed: the last text that the processor printed in its calls, also about other rows of them.
    """

    processor: LoadedProcessor
    params: dict[str, Any]
    rid: str
    prepared: Any = None
    own_count: CallCount = field(default_factory=CallCount)
    shared_counts: list[CallCount] = field(default_factory=list)
    executor_row: ExecutorRow | None = None
    before: tuple[str, ...] = ()
    is_last: bool = True
    output_token_ids: list[int] = field(default_factory=list)
    forked_row: ExecutorRow | None = None
    printed: str = ""

    def fork(self, output_token_ids: list[int]) -> ProcessorUse:
        """Return the use of another sequence that continues from this one's history, see `ExecutorRow.fork`.

        This sequence must have a row. The other one gets a row next, or is closed by `drop_fork`.

        Raises:
            ProcessorFault: the processor's state of the sequence cannot be copied.
        """
        forked_row = self.attached_row.fork(output_token_ids)
        return replace(self, own_count=self.count, shared_counts=[], executor_row=None, forked_row=forked_row)

    @property
    def attached_row(self) -> ExecutorRow:
        """Its `executor_row`, while it has a row of the batch."""
        assert self.executor_row is not None
        return self.executor_row

    def drop_fork(self) -> None:
        """Close a fork that will never get a row of the batch. Does nothing if it has one, or is no fork."""
        if self.forked_row is not None:
            self.forked_row.close()
            self.forked_row = None

    def merge_shared_counts(self) -> None:
        """Add the shared counts to `own_count`: the batch has changed, and so have the groups."""
        if self.shared_counts:
            self.own_count, self.shared_counts = self.count, []

    def add_printed(self, text: str) -> None:
        """Append what the processor printed in a call."""
        self.printed = (self.printed + text)[-MAX_PRINTED:]

    @property
    def name(self) -> str:
        """Name of the processor."""
        return self.processor.name

    @property
    def receipt(self) -> Receipt:
        """Receipt for the response."""
        count = self.count
        milliseconds = round(count.seconds * 1e3, 3)
        return Receipt(
            self.processor.digest, self.processor.name, count.steps, milliseconds, count.forced_steps, self.printed
        )

    @property
    def count(self) -> CallCount:
        """Copy of the counts of all calls so far."""
        count = CallCount()
        for each in (self.own_count, *self.shared_counts):
            count.add(each.steps, each.seconds, each.forced_steps)
        return count


def fork_uses(uses: Iterable[ProcessorUse], output_token_ids: list[int]) -> tuple[ProcessorUse, ...]:
    """Fork all uses of a sequence, see `ProcessorUse.fork`.

    Raises:
        ProcessorFault: a state cannot be copied. The forks made so far are closed.
    """
    forks: list[ProcessorUse] = []
    with contextlib.ExitStack() as on_failure:
        for use in uses:
            forks.append(use.fork(output_token_ids))
            on_failure.callback(forks[-1].drop_fork)
        on_failure.pop_all()
    return tuple(forks)


def uses_of(params: SamplingParams) -> tuple[ProcessorUse, ...]:
    """Return the uses attached to a request's sampling parameters, which know them as `AttachedProcessor`s alone."""
    return cast("tuple[ProcessorUse, ...]", params.processors)


def in_run_order(uses: Iterable[ProcessorUse]) -> list[ProcessorUse]:
    """Sort a request's processors as they run: masks first. The masks run again after the others."""
    return sorted(uses, key=lambda use: not use.processor.is_mask)


MAX_PRINTED = 1 << 13
"""Maximum number of printed characters that are kept for a request: the last ones."""

ObserveCall: TypeAlias = "Callable[[int, float, LogitsUse], None]"
"""Takes the number of rows of a call, its duration in seconds, and its use of the logits."""


class ProcessorGroup:
    """All rows of one processor in one stage.

    Args:
        processor: the processor.
        again: True if it is a mask that has already run before the other processors.
        members: members by row.
        observe_call: called after each call.

    Attributes:
        rows: row numbers, ascending.
        is_adjacent: True if the rows are consecutive, so that they are a view of the logits.
        is_last: True if nothing edits their logits afterwards.
        executor_group: the rows at the processor's executor.
    """

    def __init__(
        self, processor: LoadedProcessor, again: bool, members: Mapping[int, ProcessorUse], observe_call: ObserveCall
    ) -> None:
        self.processor = processor
        self.again = again
        self.rows = sorted(members)
        self.members = [members[row] for row in self.rows]
        self.observe_call = observe_call
        self.is_adjacent = self.rows[-1] - self.rows[0] + 1 == len(self.rows)
        self._index = slice(self.rows[0], self.rows[-1] + 1) if self.is_adjacent else self.rows
        self.is_last = all(member.is_last for member in self.members)
        self.executor_group = processor.executor.group(processor, [member.attached_row for member in self.members])
        self._count: CallCount | None = None

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the group's rows of the batch's logits."""
        return logits[self._index]

    def batch_rows(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows of the batch for some rows of the group's calls; a range if they are consecutive."""
        if len(rows) == len(self.rows):
            return range(self.rows[0], self.rows[-1] + 1) if self.is_adjacent else self.rows
        return [self.rows[row] for row in rows]

    def row_of(self, use: ProcessorUse) -> int:
        """Return the row of one of its members."""
        return next(row for row, member in zip(self.rows, self.members, strict=True) if member is use)

    def share_count(self) -> None:
        """Count calls once for all members from now on, until they are regrouped."""
        self._count = CallCount()
        for member in self.members:
            member.shared_counts.append(self._count)

    def stop_sharing_count(self) -> None:
        """Count the next call for each member by itself: it ends after they are regrouped."""
        self._count = None

    def count(self, outcome: RunOutcome) -> None:
        """Count a call."""
        total, faults = outcome.seconds, outcome.faults
        num_rows = len(self.rows)
        self.observe_call(num_rows, total, outcome.logits_use)
        if outcome.printed:
            for member in self.members:
                member.add_printed(outcome.printed)
        steps, seconds = 0 if self.again else 1, total / num_rows
        count = self._count
        if count is not None and not faults:
            count.steps += steps
            count.seconds += seconds
            return
        for row, member in enumerate(self.members):
            if row not in faults:
                member.own_count.add(steps, seconds)

    def select(self, new_rows: Mapping[int, int]) -> ProcessorGroup | None:
        """Return the group of the rows in `new_rows`, at the rows that it maps them to; None if there are none."""
        rows = zip(self.rows, self.members, strict=True)
        members = {new_rows[row]: member for row, member in rows if row in new_rows}
        return ProcessorGroup(self.processor, self.again, members, self.observe_call) if members else None


StageKey: TypeAlias = tuple[bool, int]
"""(True for masks that run again, number of the processor in its request). Stages run in this order."""


class GroupStage:
    """Groups without a common row: their calls may overlap.

    Args:
        key: position of the stage in the run order.
        groups: groups in any order.

    Attributes:
        groups: all groups, by their first rows.
        local: those whose processors run in this process.
        concurrent: those whose processors run elsewhere in the meantime.
        is_split: True if the rows of all groups can be taken at once.
    """

    def __init__(self, key: StageKey, groups: Iterable[ProcessorGroup]) -> None:
        self.key = key
        self.groups = sorted(groups, key=lambda group: group.rows[0])
        self.local = [group for group in self.groups if isinstance(group.executor_group, LocalGroup)]
        self.concurrent = [group for group in self.groups if not isinstance(group.executor_group, LocalGroup)]
        self.is_split = len(self.groups) > 1 and all(group.is_adjacent for group in self.groups)
        sizes: list[int] = []
        self._pieces: list[tuple[ProcessorGroup, int]] = []
        end = 0
        for group in self.groups:
            if group.rows[0] > end:
                sizes.append(group.rows[0] - end)  # rows without a group
            self._pieces.append((group, len(sizes)))
            sizes.append(len(group.rows))
            end = group.rows[-1] + 1
        self._sizes, self._end = sizes, end

    def split(self, logits: torch.Tensor) -> dict[ProcessorGroup, torch.Tensor]:
        """Return the rows of each group in the batch's logits, as views. In a third of the time of separate slices."""
        # "Unsafe" means that autograd does not track the pieces as views of one tensor.
        rest = len(logits) - self._end
        pieces = torch.unsafe_split_with_sizes(logits.detach(), [*self._sizes, rest] if rest else self._sizes)
        return {each: pieces[piece] for each, piece in self._pieces}

    def without(self, rows: Container[int]) -> GroupStage:
        """Return the stage without some rows."""
        return self.select({row: row for group in self.groups for row in group.rows if row not in rows})

    def select(self, new_rows: Mapping[int, int]) -> GroupStage:
        """Return the stage of the rows in `new_rows`, at the rows that it maps them to."""
        return GroupStage(self.key, [there for group in self.groups if (there := group.select(new_rows)) is not None])


class StageLogits:
    """The rows of each group of a stage, and the edits that its calls recorded.

    Rows are taken when they are needed: a call that recorded edits needs none.

    Args:
        stage: the groups.
        logits: float32 [rows of the batch, vocab].
        observe: called with the edits of each call.

    Attributes:
        apply_seconds: seconds that it took to apply the edits of each group.
    """

    def __init__(
        self, stage: GroupStage, logits: torch.Tensor, observe: Callable[[ProcessorGroup, GroupEdits], None]
    ) -> None:
        self._stage = stage
        self._observe = observe
        self._logits = logits
        self._rows: dict[ProcessorGroup, torch.Tensor] = {}
        self._edits: list[tuple[Sequence[int], GroupEdits]] = []
        self._edited: list[ProcessorGroup] = []
        self.apply_seconds: dict[ProcessorGroup, float] = {}

    def rows_of(self, group: ProcessorGroup) -> torch.Tensor:
        """Return the rows of a group, float32 [rows, vocab]: a view if they are adjacent, else a copy."""
        rows = self._rows.get(group)
        if rows is None:
            if self._stage.is_split:
                self._rows = self._stage.split(self._logits)
                rows = self._rows[group]
            else:
                rows = self._rows[group] = group.rows_of(self._logits)
        return rows

    def collector_of(self, group: ProcessorGroup) -> CollectEdits:
        """Return the function that collects the edits of a group, see `Run.finish`."""

        def collect(rows: Sequence[int], edits: GroupEdits) -> None:
            self._observe(group, edits)
            self._edited.append(group)
            self._edits.append((group.batch_rows(rows), edits))

        return collect

    def apply_edits(self) -> dict[ProcessorGroup, ProcessorFault]:
        """Apply all edits to the batch's logits at once. Return the groups whose edits cannot be applied."""
        if not self._edits:
            return {}
        began = time.perf_counter()
        errors = apply_separately(self._logits, self._edits)
        seconds = time.perf_counter() - began
        touched = [num_touched(edits, self._logits.shape[-1]) for _, edits in self._edits]
        per_element = seconds / max(1, sum(touched))
        self.apply_seconds = {group: per_element * count for group, count in zip(self._edited, touched, strict=True)}
        for group in self._edited:
            if not group.is_adjacent:
                self._rows.pop(group, None)  # a copy from before
        failed = {self._edited[number]: error for number, error in errors.items()}
        return {
            group: internal_fault(group.processor.name, group.processor.digest, error)
            for group, error in failed.items()
        }

    def write_back(self, group: ProcessorGroup) -> None:
        """Write the rows of a group that are not adjacent to the batch's logits, if they were taken."""
        if group in self._rows:
            self._logits[group.rows] = self._rows[group]


def group_rows(
    rows: Mapping[int, Sequence[ProcessorUse]], observer: Callable[[LoadedProcessor], ObserveCall]
) -> list[GroupStage]:
    """Return the stages in run order. A request's first processor is in stage (False, 0).

    Args:
        rows: members of each row, in run order.
        observer: returns the observer of a processor's calls.
    """
    stages: defaultdict[StageKey, defaultdict[tuple[str, int | None], dict[int, ProcessorUse]]]
    stages = defaultdict(lambda: defaultdict(dict))
    for row, members in sorted(rows.items()):
        for stage, member in _stages(members):
            processor = member.processor
            stages[stage][processor.group_name, row if processor.per_sequence else None][row] = member
    return [
        GroupStage(key, [_group(key[0], members, observer) for members in groups.values()])
        for key, groups in sorted(stages.items(), key=lambda item: item[0])
    ]


def _group(
    again: bool, members: Mapping[int, ProcessorUse], observer: Callable[[LoadedProcessor], ObserveCall]
) -> ProcessorGroup:
    processor = next(iter(members.values())).processor
    group = ProcessorGroup(processor, again, members, observer(processor))
    group.share_count()
    return group


def _stages(members: Sequence[ProcessorUse]) -> Iterator[tuple[StageKey, ProcessorUse]]:
    """Yield the members that run on a row, each with its stage.

    Args:
        members: members in run order.
    """
    for number, member in enumerate(members):
        yield (False, number), member
    masks = [member for member in members if member.processor.is_mask]
    if len(masks) < len(members):
        for number, member in enumerate(masks):
            yield (True, number), member


GroupKey: TypeAlias = tuple[str, ...]
"""Group names of a row's processors in run order; () if it has none."""


def group_key(params: SamplingParams) -> GroupKey:
    """Return the key of a request.

    A processor that belongs to one sequence is a group of one row at any position. "" stands for it in the key, and is
    dropped at the end.
    """
    in_order = in_run_order(uses_of(params))
    names = ["" if use.processor.per_sequence else use.processor.group_name for use in in_order]
    while names and not names[-1]:
        names.pop()
    return tuple(names)
