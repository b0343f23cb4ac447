"""The persistent batch: requests keep their rows from step to step, and each step's changes are a `BatchUpdate`.

Rows may be swapped, so that those of a group are adjacent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from logitship.sampler.batch_processors.interface import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
    RemovedRequest,
)
from logitship.sampler.sampling_params import SamplingParams


class BatchUpdateBuilder:
    """Collects the changes of one step. Names are those of vLLM's class of the same name.

    A step first registers all removals. It then fills freed rows: an addition, or a move from the end of the batch,
    takes the lowest one with `pop_removed`. The rows left in `removed` at the end were not filled again.

    Assumptions:
    * A step registers its last removal before it first reads, peeks at or pops `removed`. `removed_append` raises on a
      later one.
    * Only `removed_append` and `pop_removed` change `removed`; `added` and `moved` are appended to.

    Guarantees:
    * `removed` is descending and has no popped rows. So a row that a request was added or moved to is not in it, and
      removals and additions may be processed in either order.
    * `peek_removed` and `pop_removed` return the lowest freed row.
    * The lists of an update are not reused: the next step has new ones.

    Args:
        removed: rows freed so far, in any order.
        added: additions so far.
        moved: moves so far.

    Attributes:
        added: additions, in order.
        moved: moves, in order.
        batch_changed: True from the first removal on. Callers that add without an entry in `added` set it, as vLLM does
            for pooling models.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed = removed or []
        self._removed_was_read = False
        self.added = added or []
        self.moved = moved or []
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Rows that were freed and not filled again, descending."""
        if not self._removed_was_read:
            self._removed.sort(reverse=True)
            self._removed_was_read = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register that row `index` was freed.

        Raises:
            RuntimeError: the removals of this step were already read.
        """
        if self._removed_was_read:
            raise RuntimeError(
                f"row {index} can no longer be removed in this step: its removals were already read. Register all "
                "removals first"
            )
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        """Return whether some freed row is not filled."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """Return the lowest freed row; None if there is none."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Return the lowest freed row, for the caller to fill; None if there is none."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Drop the changes of this step.

        Returns:
            `batch_changed` before the call.
        """
        batch_changed = self.batch_changed
        self._removed.clear()
        self.added.clear()
        self.moved.clear()
        self._begin_step()
        return batch_changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the update of this step, and start the next step.

        Args:
            batch_size: number of requests in the batch now.

        Returns:
            None if nothing was removed, added or moved.
        """
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
            self._removed, self.added, self.moved = [], [], []
        self._begin_step()
        return update

    def _begin_step(self) -> None:
        self._removed_was_read = False
        self.batch_changed = False


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


RowKey: TypeAlias = tuple[str, ...]
"""Names of the groups that a row is in, the first one first; () if it is in none."""


def adjacent_swaps(keys: Sequence[RowKey]) -> list[tuple[int, int]]:
    """Find swaps that make the rows of a group adjacent.

    Afterwards the rows of the same first processor are adjacent, among these the rows of the same second one, and so
    on. The minimum number of swaps is NP-hard to find, even for sorting repeated keys (Amir et al. 2009, "On the cost
    of interchange rearrangement in strings"). So this is a heuristic in two parts, linear except for sorting the
    groups. First each group is assigned the position where most of its rows already are, and rows without a group fill
    the rest. Then rows are swapped into place, preferably by swaps that put both rows in place.

    Guarantees:
    * No swaps if the groups are already adjacent.
    * Each swap puts at least one row in its final place, the last one two: there are fewer swaps than rows.

    Args:
        keys: keys of all rows, in row order.

    Returns:
        (row, row) swaps, to be done in order.
    """
    return _swaps(keys, _arranged(keys))


def _arranged(keys: Sequence[RowKey]) -> list[RowKey]:
    """Return the key that belongs at each row."""
    arranged = list(keys)
    # (first row, number of processors that its members share, members in their current order)
    blocks: list[tuple[int, int, Sequence[RowKey]]] = [(0, 0, keys)]
    # Not recursive: a request may have more processors than Python's recursion limit.
    while blocks:
        first, depth, members = blocks.pop()
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for place, key in enumerate(members):
            if len(key) > depth:
                groups[key[depth]].append(place)
        ended = next((key for key in members if len(key) == depth), None)
        if ended is not None:  # rows without a further processor fill the gaps between groups
            arranged[first : first + len(members)] = [ended] * len(members)
        for start, places in _placed(groups.values(), len(members)):
            blocks.append((first + start, depth + 1, [members[place] for place in places]))
    return arranged


def _placed(groups: Iterable[list[int]], size: int) -> list[tuple[int, list[int]]]:
    """Give each group a start, so that no groups overlap and all end before `size`."""
    wanted = sorted((_fullest_window(places), places) for places in groups)
    placed = []
    free, remaining = 0, sum(len(places) for _, places in wanted)
    for start, places in wanted:
        start = min(max(start, free), size - remaining)
        placed.append((start, places))
        free = start + len(places)
        remaining -= len(places)
    return placed


def _fullest_window(places: list[int]) -> int:
    """Return the start of the window of the group's length that has most of its places, which ascend."""
    begin, most = places[0], 0
    end = 0
    for number, place in enumerate(places):
        while end < len(places) and places[end] < place + len(places):
            end += 1
        if end - number > most:
            begin, most = place, end - number
    return begin


def _swaps(keys: Sequence[RowKey], arranged: Sequence[RowKey]) -> list[tuple[int, int]]:
    """Return swaps that turn one order of keys into another."""
    swaps = []
    # Misplaced rows, by their current key, then by the key that belongs there.
    misplaced: defaultdict[RowKey, dict[RowKey, list[int]]] = defaultdict(dict)
    for row, (key, belongs) in enumerate(zip(keys, arranged, strict=True)):
        if key == belongs:
            continue
        if key in misplaced[belongs]:
            partner, _ = _take(misplaced[belongs], key)
            swaps.append((partner, row))
        else:
            misplaced[key].setdefault(belongs, []).append(row)
    for key, rows in misplaced.items():
        while rows:
            row, belongs = _take(rows, key)
            # Follow the row with `key` from place to place until it is where it belongs.
            while belongs != key:
                source, source_belongs = _take(misplaced[belongs], key)
                swaps.append((row, source))
                row, belongs = source, source_belongs
    return swaps


def _take(rows: dict[RowKey, list[int]], preferred: RowKey) -> tuple[int, RowKey]:
    """Remove and return one of the rows with a key, and the key that belongs there: `preferred` if possible."""
    belongs = preferred if preferred in rows else next(iter(rows))
    row = rows[belongs].pop()
    if not rows[belongs]:
        del rows[belongs]
    return row, belongs
