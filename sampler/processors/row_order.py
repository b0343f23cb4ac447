"""Reordering of the batch's rows so that the rows of each processor are adjacent.

Adjacent rows are a view of the logits; scattered rows have to be gathered and written back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .processor_use import in_run_order, uses_of

if TYPE_CHECKING:
    from logitship.sampler.sampling_params import SamplingParams

GroupKey: TypeAlias = tuple[str, ...]
"""Group names of a row's processors in run order; () if it has none."""


def group_key(params: SamplingParams) -> GroupKey:
    """Return the key of a request.

    A processor that belongs to one sequence is a group of one row at any position. "" keeps its place in the key, and
    is dropped at the end.
    """
    in_order = in_run_order(uses_of(params))
    names = ["" if use.processor.per_sequence else use.processor.group_name for use in in_order]
    while names and not names[-1]:
        names.pop()
    return tuple(names)


def adjacent_swaps(keys: Sequence[GroupKey]) -> list[tuple[int, int]]:
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


def _arranged(keys: Sequence[GroupKey]) -> list[GroupKey]:
    """Return the key that belongs at each row."""
    arranged = list(keys)
    # (first row, number of processors that its members share, members in their current order)
    blocks: list[tuple[int, int, Sequence[GroupKey]]] = [(0, 0, keys)]
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


def _swaps(keys: Sequence[GroupKey], arranged: Sequence[GroupKey]) -> list[tuple[int, int]]:
    """Return swaps that turn one order of keys into another."""
    swaps = []
    # Misplaced rows, by their current key, then by the key that belongs there.
    misplaced: defaultdict[GroupKey, dict[GroupKey, list[int]]] = defaultdict(dict)
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


def _take(rows: dict[GroupKey, list[int]], preferred: GroupKey) -> tuple[int, GroupKey]:
    """Remove and return one of the rows with a key, and the key that belongs there: `preferred` if possible."""
    belongs = preferred if preferred in rows else next(iter(rows))
    row = rows[belongs].pop()
    if not rows[belongs]:
        del rows[belongs]
    return row, belongs
