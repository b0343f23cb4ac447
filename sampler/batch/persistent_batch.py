"""The persistent batch: each request keeps its row from step to step, and the changes of a step are a `BatchUpdate`."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality
from logitship.sampler.sampling_params import SamplingParams

from .batch_update_builder import BatchUpdateBuilder


class BatchMember(Protocol):
    """What a request must have to hold a row."""

    @property
    def sampling_params(self) -> SamplingParams:
        """What it asks of the sampler."""
        ...

    @property
    def prompt_token_ids(self) -> list[int]:
        """Its prompt."""
        ...

    @property
    def output_token_ids(self) -> list[int]:
        """Its output so far: one list, which grows."""
        ...


MemberT = TypeVar("MemberT", bound=BatchMember)


class PersistentBatch(Generic[MemberT]):
    """Requests at fixed rows. A step is: `remove` those that ended, `add` new ones, `commit`.

    To reorder the batch, `condense` and then `swap` rows before `commit`.

    Assumptions:
    * All removals of a step come before its first addition, and both before the first row that moves: that is the
      order in which an update is followed. A call that comes too late is refused.

    Guarantees (after `commit`, as in vLLM's `InputBatch`):
    * The rows in use are 0 to size - 1: a new request takes the lowest freed row, and rows that stay free are filled
      by one-way moves from the end.
    * `removed` holds the rows that nothing filled. It is disjoint from the rows of `added`, so that it does not matter
      which of the two is processed first.
    * `added` refers to the request's own output list: it grows with the output.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._rows: list[MemberT | None] = []
        self._row_of: dict[int, int] = {}
        self._most_rows = 0
        self._changes = BatchUpdateBuilder()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def changed(self) -> bool:
        """True if a request came, went or moved since the last `commit`."""
        return bool(self._changes.has_removed() or self._changes.added or self._changes.moved)

    @property
    def members(self) -> list[MemberT]:
        """The requests in row order. A place in this list is a row only while there is no gap: after `condense`."""
        return [member for member in self._rows if member is not None]

    def __contains__(self, member: MemberT) -> bool:
        return id(member) in self._row_of

    def remove(self, member: MemberT) -> None:
        """Free a request's row.

        Raises:
            KeyError: it has none.
            RuntimeError: something was added, condensed or moved in this step already.
        """
        if self._changes.added or self._changes.moved:
            raise RuntimeError("all removals of a step come before its first addition and its first move")
        row = self._row_of[id(member)]
        self._changes.removed_append(row)
        del self._row_of[id(member)]
        self._rows[row] = None

    def add(self, member: MemberT) -> int:
        """Give a request the lowest freed row, or a new one at the end.

        Raises:
            RuntimeError: the batch is full, it has the request already, or something was moved in this step already.
        """
        if self._changes.moved:
            raise RuntimeError("all additions of a step come before its first move")
        if member in self:
            raise RuntimeError("the request has a row already")
        if len(self) == self.max_num_seqs:
            raise RuntimeError(f"the batch is full: it has {self.max_num_seqs} rows")
        freed = self._changes.pop_removed()
        row = len(self._rows) if freed is None else freed
        if row == len(self._rows):
            self._rows.append(None)
            self._most_rows = max(self._most_rows, len(self._rows))
        self._rows[row] = member
        self._row_of[id(member)] = row
        self._changes.added.append((row, member.sampling_params, member.prompt_token_ids, member.output_token_ids))
        return row

    def clear(self) -> None:
        """Drop every request, and every change that was not committed: for when a step failed half-way.

        Nobody knows which batch processor followed the last update then. So the next one removes every row that any
        of them could hold state for, rows that are free already among them.
        """
        self._rows, self._row_of = [], {}
        self._changes.reset()
        for row in range(self._most_rows):
            self._changes.removed_append(row)

    def swap(self, row_1: int, row_2: int) -> None:
        """Let two requests change places.

        Raises:
            IndexError: a row is not in use.
            RuntimeError: there are gaps: `condense` comes first.
        """
        if len(self._rows) != len(self):
            raise RuntimeError("close the gaps before rows are swapped: call condense()")
        if not (0 <= row_1 < len(self) and 0 <= row_2 < len(self)):
            raise IndexError(f"cannot swap rows {row_1} and {row_2}: the batch has {len(self)}")
        if row_1 == row_2:
            return
        self._rows[row_1], self._rows[row_2] = self._rows[row_2], self._rows[row_1]
        for row in (row_1, row_2):
            self._row_of[id(self._rows[row])] = row
        self._changes.moved.append((row_1, row_2, MoveDirectionality.SWAP))

    def commit(self) -> BatchUpdate | None:
        """Close the gaps and say what changed since the last call; None if nothing did."""
        self.condense()
        return self._changes.get_and_reset(len(self))

    def condense(self) -> None:
        """Fill each free row, lowest first, with the last request. Does nothing where there is no gap."""
        self._drop_free_rows_at_the_end()
        while (gap := self._changes.peek_removed()) is not None and gap < len(self._rows):
            self._changes.pop_removed()
            self._move_last_to(gap)
            self._drop_free_rows_at_the_end()

    def _move_last_to(self, gap: int) -> None:
        member = self._rows.pop()
        assert member is not None
        self._rows[gap] = member
        self._row_of[id(member)] = gap
        self._changes.moved.append((len(self._rows), gap, MoveDirectionality.UNIDIRECTIONAL))

    def _drop_free_rows_at_the_end(self) -> None:
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
