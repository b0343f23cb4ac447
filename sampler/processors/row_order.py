"""Which rows change places so that the rows of a processor stand side by side.

Rows that are adjacent are a view of the logits; scattered ones have to be gathered and written back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from .processor_use import in_run_order, uses_of

if TYPE_CHECKING:
    from logitship.sampler.sampling_params import SamplingParams

GroupKey: TypeAlias = tuple[str, ...]
"""Group names of a row's processors, in the order in which they run; () if it has none."""


def group_key(params: SamplingParams) -> GroupKey:
    """The key of a request.

    A processor that belongs to one sequence is a group of one row wherever that stands: "" holds its place, and is left
    out at the end.
    """
    in_order = in_run_order(uses_of(params))
    names = ["" if use.processor.per_sequence else use.processor.group_name for use in in_order]
    while names and not names[-1]:
        names.pop()
    return tuple(names)


def adjacent_swaps(keys: Sequence[GroupKey]) -> list[tuple[int, int]]:
    """Find swaps that make the rows of a group adjacent.

    Afterwards rows of the same first processor are adjacent, among these rows those of the same second one, and so
    on. The fewest swaps cannot be had cheaply: to sort repeated keys with the fewest is NP-hard already (Amir et al.
    2009, "On the cost of interchange rearrangement in strings"). So it is done in two parts, linear but for sorting the
    groups. First each group gets the place where most of its rows stand already, and rows without a group fill what is
    left. Then rows go where they belong, as many as possible by swaps that put both rows right.

    Guarantees:
    * No swaps if the groups are adjacent already.
    * Each swap puts at least one row right for good, the last one two: there are fewer swaps than rows.

    Args:
        keys: of all rows, in row order.

    Returns:
        (row, row), to be done one after the other.
    """
    return _swaps(keys, _arranged(keys))


def _arranged(keys: Sequence[GroupKey]) -> list[GroupKey]:
    """The key that belongs at each row."""
    arranged = list(keys)
    # (first row, how many processors its members share, members in the order in which they stand now)
    blocks: list[tuple[int, int, Sequence[GroupKey]]] = [(0, 0, keys)]
    # Not recursive: a request may carry more processors than Python nests calls.
    while blocks:
        first, depth, members = blocks.pop()
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for place, key in enumerate(members):
            if len(key) > depth:
                groups[key[depth]].append(place)
        ended = next((key for key in members if len(key) == depth), None)
        if ended is not None:  # those without a further processor stand where no group will
            arranged[first : first + len(members)] = [ended] * len(members)
        for start, places in _placed(groups.values(), len(members)):
            blocks.append((first + start, depth + 1, [members[place] for place in places]))
    return arranged


def _placed(groups: Iterable[list[int]], size: int) -> list[tuple[int, list[int]]]:
    """Give each group a start, such that none overlaps another and all end before `size`."""
    wanted = sorted((_fullest_window(places), places) for places in groups)
    placed = []
    free, to_come = 0, sum(len(places) for _, places in wanted)
    for start, places in wanted:
        start = min(max(start, free), size - to_come)
        placed.append((start, places))
        free = start + len(places)
        to_come -= len(places)
    return placed


def _fullest_window(places: list[int]) -> int:
    """Where a window as long as the group begins that holds most of its places, which ascend."""
    begin, most = places[0], 0
    end = 0
    for number, place in enumerate(places):
        while end < len(places) and places[end] < place + len(places):
            end += 1
        if end - number > most:
            begin, most = place, end - number
    return begin


def _swaps(keys: Sequence[GroupKey], arranged: Sequence[GroupKey]) -> list[tuple[int, int]]:
    """Turn one order of keys into another."""
    swaps = []
    # Misplaced rows, by the key that stands there, then by the key that belongs there.
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
            # Follow the row that holds `key` from place to place, until it is where it belongs.
            while belongs != key:
                source, source_belongs = _take(misplaced[belongs], key)
                swaps.append((row, source))
                row, belongs = source, source_belongs
    return swaps


def _take(rows: dict[GroupKey, list[int]], preferred: GroupKey) -> tuple[int, GroupKey]:
    """Take out one of the rows where a key stands, and which key belongs there: `preferred` if there is such a row."""
    belongs = preferred if preferred in rows else next(iter(rows))
    row = rows[belongs].pop()
    if not rows[belongs]:
        del rows[belongs]
    return row, belongs
