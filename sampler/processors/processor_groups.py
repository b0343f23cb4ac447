"""Which rows each shipped processor is called for: worked out when the batch changes, and kept until it does again."""

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
"""Takes the number of rows, and the seconds of a call."""


@dataclass(frozen=True, eq=False)
class GroupMember:
    """A use in its place, and the sequence at the processor's executor.

    Attributes:
        before: names of what may have forbidden tokens before it: fields of the request, and earlier processors.
        is_last: nothing of the same request edits the row's logits after it.
    """

    use: ProcessorUse
    executor_row: ExecutorRow
    before: tuple[str, ...]
    is_last: bool


class ProcessorGroup:
    """All rows of one processor, at one place in the order in which its requests' processors run.

    Args:
        again: it is a mask that ran before the others already.
        members: by row.
        observe_call: told of each call, after it.

    Attributes:
        rows: row numbers, ascending.
        is_adjacent: the rows follow one another, so that they are a view of the logits.
        is_last: nothing edits their logits after it.
    """

    def __init__(
        self, processor: LoadedProcessor, again: bool, members: Mapping[int, GroupMember], observe_call: ObserveCall
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
        """Its rows of the batch's logits."""
        return logits[self._index]

    def share_count(self) -> None:
        """Count calls for all members at once from now on, until they are members of another group that does."""
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

    def at(self, places: Mapping[int, int]) -> ProcessorGroup | None:
        """Those of the rows that have a place, by their places; None if none has."""
        members = {places[row]: member for row, member in zip(self.rows, self.members, strict=True) if row in places}
        return ProcessorGroup(self.processor, self.again, members, self.observe_call) if members else None


class GroupStage:
    """Groups that have no row in common.

    Args:
        groups: in any order.
    """

    def __init__(self, groups: Iterable[ProcessorGroup]) -> None:
        self.groups = sorted(groups, key=lambda group: group.rows[0])
        self._is_split = len(self.groups) > 1 and all(group.is_adjacent for group in self.groups)
        sizes: list[int] = []
        self._pieces: list[tuple[ProcessorGroup, int]] = []
        end = 0
        for group in self.groups:
            if group.rows[0] > end:
                sizes.append(group.rows[0] - end)  # rows of nobody
            self._pieces.append((group, len(sizes)))
            sizes.append(len(group.rows))
            end = group.rows[-1] + 1
        self._sizes, self._end = sizes, end

    def rows_of(self, logits: torch.Tensor) -> list[tuple[ProcessorGroup, torch.Tensor]]:
        """Each group's rows of the batch's logits: a view if they are adjacent, a copy if not."""
        if not self._is_split:
            return [(group, group.rows_of(logits)) for group in self.groups]
        # Takes a third of the time of as many slices. Unsafe is what it leaves out: to tie the pieces to each other and
        # to the whole, for gradients.
        rest = len(logits) - self._end
        pieces = torch.unsafe_split_with_sizes(logits.detach(), [*self._sizes, rest] if rest else self._sizes)
        return [(group, pieces[piece]) for group, piece in self._pieces]

    def without(self, rows: Container[int]) -> GroupStage:
        """The same without some rows."""
        return self.at({row: row for group in self.groups for row in group.rows if row not in rows})

    def at(self, places: Mapping[int, int]) -> GroupStage:
        """Those of the rows that have a place, by their places."""
        return GroupStage(there for group in self.groups if (there := group.at(places)) is not None)


def group_rows(
    rows: Mapping[int, Sequence[GroupMember]], observer: Callable[[LoadedProcessor], ObserveCall]
) -> list[GroupStage]:
    """The stages, in the order in which they run: what of a request runs first is in stage (False, 0).

    Args:
        rows: the members of each row, in run order.
        observer: what is told of a processor's calls.
    """
    stages: defaultdict[tuple[bool, int], defaultdict[tuple[str, int | None], dict[int, GroupMember]]]
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
    again: bool, members: Mapping[int, GroupMember], observer: Callable[[LoadedProcessor], ObserveCall]
) -> ProcessorGroup:
    processor = next(iter(members.values())).use.processor
    group = ProcessorGroup(processor, again, members, observer(processor))
    group.share_count()
    return group


def _stages(members: Sequence[GroupMember]) -> Iterator[tuple[tuple[bool, int], GroupMember]]:
    """What runs on a row, each with its stage.

    Args:
        members: in run order.
    """
    for number, member in enumerate(members):
        yield (False, number), member
    masks = [member for member in members if member.use.processor.is_mask]
    if len(masks) < len(members):
        for number, member in enumerate(masks):
            yield (True, number), member
