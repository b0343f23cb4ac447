"""The persistent batch: requests keep their rows from step to step, and each step's changes are a `BatchUpdate`."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality
from logitship.sampler.sampling_params import SamplingParams

from .batch_update_builder import BatchUpdateBuilder


class BatchMember(Protocol):
    """A request that can hold a row."""

    @property
    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of the request."""
        ...

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        ...

    @property
    def output_token_ids(self) -> list[int]:
        """Token ids of the output so far: always the same list, which grows."""
        ...


MemberT = TypeVar("MemberT", bound=BatchMember)


class PersistentBatch(Generic[MemberT]):
    """Requests at fixed rows. In each step, `remove` finished requests, `add` new ones, then `commit`.

    To reorder the batch, `condense` and then `swap` rows before `commit`.

    Assumptions:
    * All removals of a step come before its first addition, and both before its first move, because updates are
      processed in this order. A call out of order raises.

    Guarantees (after `commit`, as in vLLM's `InputBatch`):
    * The rows in use are 0 to size - 1: a new request takes the lowest freed row, and rows that stay free are filled
      by one-way moves from the end.
    * `removed` has the rows that were not filled again. It is disjoint from the rows of `added`, so that the two may be
      processed in either order.
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
        """True if a request was added, removed or moved since the last `commit`."""
        return bool(self._changes.has_removed() or self._changes.added or self._changes.moved)

    @property
    def members(self) -> list[MemberT]:
        """Requests in row order. Indices equal rows only without gaps, that is, after `condense`."""
        return [member for member in self._rows if member is not None]

    def __contains__(self, member: MemberT) -> bool:
        return id(member) in self._row_of

    def remove(self, member: MemberT) -> None:
        """Free a request's row.

        Raises:
            KeyError: the request has no row.
            RuntimeError: this step has already added, condensed or moved rows.
        """
        if self._changes.added or self._changes.moved:
            raise RuntimeError("all removals of a step must come before its first addition and its first move")
        row = self._row_of[id(member)]
        self._changes.removed_append(row)
        del self._row_of[id(member)]
        self._rows[row] = None

    def add(self, member: MemberT) -> int:
        """Give a request the lowest freed row, or a new one at the end.

        Raises:
            RuntimeError: the batch is full or already has the request, or this step has already moved rows.
        """
        if self._changes.moved:
            raise RuntimeError("all additions of a step must come before its first move")
        if member in self:
            raise RuntimeError("the request already has a row")
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
        """Drop every request and every uncommitted change, after a step that failed midway.

        It is then unknown which batch processors have applied the last update. So the next update removes every row
        that any of them could hold state for, including rows that are already free.
        """
        self._rows, self._row_of = [], {}
        self._changes.reset()
        for row in range(self._most_rows):
            self._changes.removed_append(row)

    def swap(self, row_1: int, row_2: int) -> None:
        """Swap the requests of two rows.

        Raises:
            IndexError: a row is not in use.
            RuntimeError: the batch has gaps: call `condense` first.
        """
        if len(self._rows) != len(self):
            raise RuntimeError("the batch has gaps: call condense() before swap()")
        if not (0 <= row_1 < len(self) and 0 <= row_2 < len(self)):
            raise IndexError(f"cannot swap rows {row_1} and {row_2}: the batch has {len(self)}")
        if row_1 == row_2:
            return
        self._rows[row_1], self._rows[row_2] = self._rows[row_2], self._rows[row_1]
        for row in (row_1, row_2):
            self._row_of[id(self._rows[row])] = row
        self._changes.moved.append((row_1, row_2, MoveDirectionality.SWAP))

    def commit(self) -> BatchUpdate | None:
        """Close the gaps and return the changes since the last call; None if nothing changed."""
        self.condense()
        return self._changes.get_and_reset(len(self))

    def condense(self) -> None:
        """Fill each free row, lowest first, with the last request. Does nothing without gaps."""
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
