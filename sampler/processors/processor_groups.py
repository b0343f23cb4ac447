"""Groups of rows that share a processor. Rebuilt only when the batch changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from .processor_use import CallCount, ProcessorUse

if TYPE_CHECKING:
    from .executor import ExecutorRow, LoadedProcessor, RunOutcome

ObserveCall: TypeAlias = Callable[[int, float], None]
"""Takes the number of rows and the duration of a call in seconds."""


@dataclass(frozen=True, eq=False)
class GroupRow:
    """One row of a group.

    Attributes:
        use: the request's use of the processor.
        executor_row: the sequence at the processor's executor.
        before: names of the request's fields and earlier processors that may have forbidden tokens before this one.
        is_last: True if nothing of the same request edits the row's logits afterwards.
    """

    use: ProcessorUse
    executor_row: ExecutorRow
    before: tuple[str, ...]
    is_last: bool


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
    """

    def __init__(
        self, processor: LoadedProcessor, again: bool, members: Mapping[int, GroupRow], observe_call: ObserveCall
    ) -> None:
        self.processor = processor
        self.again = again
        self.rows = sorted(members)
        self.members = [members[row] for row in self.rows]
        self.observe_call = observe_call
        self.is_adjacent = self.rows[-1] - self.rows[0] + 1 == len(self.rows)
        self._index = slice(self.rows[0], self.rows[-1] + 1) if self.is_adjacent else self.rows
        self.is_last = all(member.is_last for member in self.members)
        self.executor_group = processor.executor.group(processor, [member.executor_row for member in self.members])
        self._count: CallCount | None = None

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the group's rows of the batch's logits."""
        return logits[self._index]

    def share_count(self) -> None:
        """Count calls once for all members from now on, until they are regrouped."""
        self._count = CallCount()
        for member in self.members:
            member.use.shared_counts.append(self._count)

    def count(self, outcome: RunOutcome) -> None:
        """Count a call."""
        total, faults, _ = outcome
        num_rows = len(self.rows)
        self.observe_call(num_rows, total)
        steps, seconds = int(not self.again), total / num_rows
        if self._count is not None and not faults:
            self._count.steps += steps
            self._count.seconds += seconds
            return
        for place, member in enumerate(self.members):
            if place not in faults:
                member.use.own_count.add(steps, seconds)

    def select(self, places: Mapping[int, int]) -> ProcessorGroup | None:
        """Return the group of the rows that have a place, renumbered by their places; None if no row has one."""
        members = {places[row]: member for row, member in zip(self.rows, self.members, strict=True) if row in places}
        return ProcessorGroup(self.processor, self.again, members, self.observe_call) if members else None


class GroupStage:
    """Groups without a common row: their calls may overlap.

    Args:
        groups: groups in any order.
    """

    def __init__(self, groups: Iterable[ProcessorGroup]) -> None:
        self.groups = sorted(groups, key=lambda group: group.rows[0])
        self._is_split = len(self.groups) > 1 and all(group.is_adjacent for group in self.groups)
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

    def rows_of(self, logits: torch.Tensor) -> list[tuple[ProcessorGroup, torch.Tensor]]:
        """Return each group's rows of the batch's logits: a view if they are adjacent, else a copy."""
        if not self._is_split:
            return [(group, group.rows_of(logits)) for group in self.groups]
        # A third of the time of separate slices. "Unsafe" means that autograd does not track the pieces as views of one
        # tensor.
        rest = len(logits) - self._end
        pieces = torch.unsafe_split_with_sizes(logits.detach(), [*self._sizes, rest] if rest else self._sizes)
        return [(group, pieces[piece]) for group, piece in self._pieces]

    def without(self, rows: Container[int]) -> GroupStage:
        """Return the stage without some rows."""
        return self.select({row: row for group in self.groups for row in group.rows if row not in rows})

    def select(self, places: Mapping[int, int]) -> GroupStage:
        """Return the stage of the rows that have a place, renumbered by their places."""
        return GroupStage(there for group in self.groups if (there := group.select(places)) is not None)


def group_rows(
    rows: Mapping[int, Sequence[GroupRow]], observer: Callable[[LoadedProcessor], ObserveCall]
) -> list[GroupStage]:
    """Return the stages in run order. A request's first processor is in stage (False, 0).

    Args:
        rows: members of each row, in run order.
        observer: returns the observer of a processor's calls.
    """
    stages: defaultdict[tuple[bool, int], defaultdict[tuple[str, int | None], dict[int, GroupRow]]]
    stages = defaultdict(lambda: defaultdict(dict))
    for row, members in sorted(rows.items()):
        for stage, member in _stages(members):
            processor = member.use.processor
            stages[stage][processor.group_name, row if processor.per_sequence else None][row] = member
    return [
        GroupStage(_group(again, members, observer) for members in groups.values())
        for (again, _), groups in sorted(stages.items(), key=lambda item: item[0])
    ]


def _group(
    again: bool, members: Mapping[int, GroupRow], observer: Callable[[LoadedProcessor], ObserveCall]
) -> ProcessorGroup:
    processor = next(iter(members.values())).use.processor
    group = ProcessorGroup(processor, again, members, observer(processor))
    group.share_count()
    return group


def _stages(members: Sequence[GroupRow]) -> Iterator[tuple[tuple[bool, int], GroupRow]]:
    """Yield the members that run on a row, each with its stage.

    Args:
        members: members in run order.
    """
    for number, member in enumerate(members):
        yield (False, number), member
    masks = [member for member in members if member.use.processor.is_mask]
    if len(masks) < len(members):
        for number, member in enumerate(masks):
            yield (True, number), member
