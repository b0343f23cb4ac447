from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.batch.persistent_batch import BatchUpdateBuilder, PersistentBatch, RowKey, adjacent_swaps
from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

ADDED: AddedRequest = (0, SamplingParams(), [1], [])
MOVED: MovedRequest = (2, 1, MoveDirectionality.UNIDIRECTIONAL)


def builder_of(*removed: int) -> BatchUpdateBuilder:
    builder = BatchUpdateBuilder()
    for row in removed:
        builder.removed_append(row)
    return builder


def test_removed_is_descending() -> None:
    assert builder_of(1, 5, 0, 3).removed == [5, 3, 1, 0]


def test_pop_and_peek_return_lowest_row() -> None:
    builder = builder_of(4, 1, 3)
    assert builder.has_removed()
    assert (builder.peek_removed(), builder.pop_removed(), builder.peek_removed()) == (1, 1, 3)
    assert builder.removed == [4, 3]
    assert (builder.pop_removed(), builder.pop_removed(), builder.pop_removed()) == (3, 4, None)
    assert builder.peek_removed() is None
    assert not builder.has_removed()


@pytest.mark.parametrize("read", ["removed", "peek_removed", "pop_removed"])
def test_removal_after_read_is_rejected(read: str) -> None:
    builder = builder_of(2)
    value: Any = getattr(builder, read)
    if callable(value):
        value()
    with pytest.raises(RuntimeError, match="row 7 can no longer be removed in this step"):
        builder.removed_append(7)
    assert 7 not in builder.removed


@pytest.mark.parametrize("end", ["reset", "get_and_reset"])
def test_next_step_accepts_removals(end: str) -> None:
    builder = builder_of(2)
    assert builder.removed == [2]
    if end == "reset":
        builder.reset()
    else:
        builder.get_and_reset(0)
    builder.removed_append(7)
    assert builder.removed == [7]


def test_peeking_without_removals_does_not_count_as_read() -> None:
    """An addition at the end of the batch must not prevent a later removal, as in vLLM."""
    builder = BatchUpdateBuilder()
    assert builder.peek_removed() is None
    assert builder.pop_removed() is None
    builder.removed_append(3)
    assert builder.removed == [3]


def test_update_has_all_changes() -> None:
    builder = builder_of(1, 4, 3)
    assert builder.pop_removed() == 1
    builder.added.append(ADDED)
    builder.moved.append(MOVED)
    assert builder.get_and_reset(9) == BatchUpdate(9, [4, 3], [ADDED], [MOVED])
    assert builder.get_and_reset(9) is None


def test_unread_removals_are_sorted() -> None:
    update = builder_of(0, 2, 1).get_and_reset(0)
    assert update is not None
    assert update.removed == [2, 1, 0]


@pytest.mark.parametrize("kind", ["removed", "added", "moved"])
def test_any_single_change_makes_an_update(kind: str) -> None:
    builder = BatchUpdateBuilder(**{kind: [{"removed": 0, "added": ADDED, "moved": MOVED}[kind]]})  # type: ignore[arg-type]
    assert builder.get_and_reset(1) is not None


def test_reused_index_is_not_reported_removed() -> None:
    builder = builder_of(0)
    builder.pop_removed()
    builder.added.append(ADDED)
    assert builder.get_and_reset(1) == BatchUpdate(1, [], [ADDED], [])


def test_update_keeps_its_lists() -> None:
    builder = builder_of(0)
    builder.added.append(ADDED)
    builder.moved.append(MOVED)
    update = builder.get_and_reset(1)
    assert update is not None
    builder.removed_append(5)
    builder.added.append(ADDED)
    builder.moved.append(MOVED)
    builder.reset()
    assert update == BatchUpdate(1, [0], [ADDED], [MOVED])


def test_reset_returns_batch_changed() -> None:
    builder = builder_of(0)
    builder.added.append(ADDED)
    builder.moved.append(MOVED)
    assert builder.reset()
    assert (builder.removed, builder.added, builder.moved) == ([], [], [])
    assert not builder.reset()
    builder.batch_changed = True
    assert builder.get_and_reset(0) is None
    assert not builder.batch_changed


@given(st.sets(st.integers(0, 50)), st.integers(0, 60))
def test_popped_and_remaining_rows_are_disjoint(rows: set[int], pops: int) -> None:
    builder = builder_of(*rows)
    popped = [row for row in (builder.pop_removed() for _ in range(pops)) if row is not None]
    assert popped == sorted(rows)[:pops]
    assert builder.removed == sorted(rows - set(popped), reverse=True)


NewRequest = Callable[..., Any]
SWAP = MoveDirectionality.SWAP

TRACES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "vllm_batch.json").read_text())[
    "traces"
]


def follow(rows: dict[int, list[int]], update: BatchUpdate | None) -> dict[int, list[int]]:
    """Apply an update literally as the contract defines it: row to live output."""
    if update is None:
        return rows
    rows = dict(rows)
    for row in update.removed:
        del rows[row]
    for row, _, _, output_token_ids in update.added:
        rows[row] = output_token_ids
    for source, target, direction in update.moved:
        if direction is SWAP:
            rows[source], rows[target] = rows[target], rows[source]
        else:
            rows[target] = rows.pop(source)
    assert len(rows) == update.batch_size
    return rows


@random_seeds(40, shares_fixtures=True)
def test_updates_locate_every_request(seed: int, new_request: NewRequest) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 5, 13])
    batch: PersistentBatch[Any] = PersistentBatch(capacity)
    present: list[Any] = []
    followed: dict[int, list[int]] = {}
    for _ in range(150):
        if rng.random() < 0.05:
            batch.clear()
            update = batch.commit()
            # It may remove rows that are already free, and must remove all others.
            removed = set(update.removed) if update else set()
            assert set(followed) <= removed <= set(range(capacity))
            assert update is None or (update.batch_size, list(update.added), list(update.moved)) == (0, [], [])
            present, followed = [], {}
        for request in rng.sample(present, rng.randint(0, min(3, len(present)))):
            batch.remove(request)
            present.remove(request)
        for _ in range(rng.randint(0, min(3, capacity - len(present)))):
            request = new_request()
            batch.add(request)
            present.append(request)
        if rng.random() < 0.5:
            batch.condense()
            for _ in range(rng.randint(0, 2) if present else 0):
                batch.swap(rng.randrange(len(present)), rng.randrange(len(present)))
        update = batch.commit()
        if update is not None:
            assert update.removed or update.added or update.moved
            assert not set(update.removed) & {row for row, *_ in update.added}
            assert list(update.removed) == sorted(set(update.removed), reverse=True)
            assert update.batch_size == len(batch) == len(present)
        followed = follow(followed, update)
        assert set(batch.members) == set(present)
        assert sorted(followed) == list(range(len(present)))
        for row, request in enumerate(batch.members):
            assert request in batch
            assert followed[row] is request.output_token_ids
        assert batch.commit() is None


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"seed{trace['seed']}")
def test_matches_vllm_recording(trace: dict[str, Any], new_request: NewRequest) -> None:
    """Replay every step of `tests/data/vllm_batch.json`, recorded from vLLM's `InputBatch`."""
    batch: PersistentBatch[Any] = PersistentBatch(trace["max_num_seqs"])
    requests: dict[str, Any] = {}
    for step in trace["steps"]:
        for name in step["finished"]:
            batch.remove(requests.pop(name))
        for new in step["new"]:
            requests[new["id"]] = new_request(new["id"])
            batch.add(requests[new["id"]])
        batch.condense()
        for row_1, row_2 in step["swaps"]:
            batch.swap(row_1, row_2)
        update = batch.commit()
        assert [request.name for request in batch.members] == step["order"]
        assert (None if update is None else in_the_words_of_the_recording(update, requests)) == step["batch_update"]


def in_the_words_of_the_recording(update: BatchUpdate, requests: dict[str, Any]) -> dict[str, Any]:
    name_of = {id(request.output_token_ids): name for name, request in requests.items()}
    return {
        "batch_size": update.batch_size,
        "removed": list(update.removed),
        "added": [[row, name_of[id(output)]] for row, _, _, output in update.added],
        "moved": [[source, target, direction.name] for source, target, direction in update.moved],
    }


def test_added_references_live_output_list(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(1)
    request = new_request(prompt_token_ids=[7])
    batch.add(request)
    update = batch.commit()
    assert update is not None
    row, params, prompt, output = update.added[0]
    assert (row, params, prompt) == (0, request.sampling_params, [7])
    request.output_token_ids.append(5)
    assert output is request.output_token_ids


def test_removals_must_precede_additions_and_moves(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(3)
    first, second, third = (new_request() for _ in range(3))
    batch.add(first)
    batch.add(second)
    with pytest.raises(RuntimeError, match="before its first addition"):
        batch.remove(first)
    with pytest.raises(RuntimeError, match="already has a row"):
        batch.add(first)
    batch.commit()
    batch.swap(0, 1)
    with pytest.raises(RuntimeError, match="first move"):
        batch.remove(first)
    with pytest.raises(RuntimeError, match="first move"):
        batch.add(third)
    batch.commit()
    assert batch.members == [second, first]
    batch.remove(first)
    with pytest.raises(KeyError):
        batch.remove(first)
    assert first not in batch


def test_removal_after_condense_is_rejected(new_request: NewRequest) -> None:
    """Even if no row moved: `condense` has read the removals."""
    batch: PersistentBatch[Any] = PersistentBatch(3)
    requests = [new_request() for _ in range(3)]
    for request in requests:
        batch.add(request)
    batch.commit()
    batch.remove(requests[2])
    batch.condense()
    with pytest.raises(RuntimeError, match="row 0 can no longer be removed in this step"):
        batch.remove(requests[0])
    assert batch.members == requests[:2]
    assert requests[0] in batch
    assert batch.commit() == BatchUpdate(2, [2], [], [])


def test_changed_predicts_update(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(3)
    requests = [new_request() for _ in range(2)]
    changes: list[Callable[[], object]] = [
        lambda: [batch.add(request) for request in requests],
        lambda: batch.swap(0, 1),
        lambda: batch.remove(requests[0]),
        batch.clear,
    ]
    for change in changes:
        assert not batch.changed
        change()
        assert batch.changed
        assert batch.commit() is not None
    batch.condense()
    assert not batch.changed


def test_full_batch_rejects_request(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(2)
    batch.add(new_request())
    batch.add(new_request())
    with pytest.raises(RuntimeError, match="it has 2 rows"):
        batch.add(new_request())


def test_swap_requires_condensed_batch(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(3)
    requests = [new_request(str(number)) for number in range(3)]
    for request in requests:
        batch.add(request)
    batch.commit()
    batch.remove(requests[0])
    with pytest.raises(RuntimeError, match="condense"):
        batch.swap(0, 1)
    batch.condense()
    batch.condense()
    with pytest.raises(IndexError, match="the batch has 2"):
        batch.swap(0, 2)
    with pytest.raises(IndexError, match="rows -1 and 0"):
        batch.swap(-1, 0)
    batch.swap(1, 1)
    update = batch.commit()
    assert update == BatchUpdate(2, [], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)])


def test_clear_removes_rows_of_lagging_processors(new_request: NewRequest) -> None:
    """A batch processor that missed the last update before the failure still has state for the earlier rows."""
    batch: PersistentBatch[Any] = PersistentBatch(4)
    requests = [new_request() for _ in range(4)]
    for request in requests:
        batch.add(request)
    missed_the_next = batch.commit()
    for request in requests[1:]:
        batch.remove(request)
    batch.commit()
    batch.clear()
    assert (len(batch), batch.members, requests[0] in batch) == (0, [], False)
    newcomer = new_request()
    assert batch.add(newcomer) == 0
    update = batch.commit()
    assert missed_the_next is not None
    assert update is not None
    # Row 0 is replaced by the addition, all others are removed.
    assert (list(update.removed), [row for row, *_ in update.added]) == ([3, 2, 1], [0])
    assert list(follow(follow({}, missed_the_next), update).values()) == [newcomer.output_token_ids]


def test_clear_drops_uncommitted_changes(new_request: NewRequest) -> None:
    batch: PersistentBatch[Any] = PersistentBatch(2)
    batch.add(new_request())
    batch.clear()
    batch.add(new_request())
    update = batch.commit()
    assert update is not None
    assert (update.batch_size, list(update.removed), len(update.added)) == (1, [], 1)


A, B, C, NONE = ("a",), ("b",), ("c",), ()
DIGESTS = st.sampled_from(["a", "b", "c", ""])
KEYS = st.lists(st.lists(DIGESTS, max_size=3).map(tuple), max_size=24)


def after(keys: Sequence[RowKey], swaps: list[tuple[int, int]]) -> list[RowKey]:
    rows = list(keys)
    for row_1, row_2 in swaps:
        rows[row_1], rows[row_2] = rows[row_2], rows[row_1]
    return rows


def groups_are_adjacent(keys: Sequence[RowKey]) -> bool:
    """Check that rows which share a prefix of their keys are adjacent."""
    beginnings = {key[:length] for key in keys for length in range(1, len(key) + 1)}
    rows_of = [[row for row, key in enumerate(keys) if key[: len(begin)] == begin] for begin in beginnings]
    return all(rows[-1] - rows[0] + 1 == len(rows) for rows in rows_of)


def least_swaps(keys: tuple[RowKey, ...]) -> int:
    """Return the minimum number of swaps by breadth-first search."""
    seen = reached = {keys}
    count = 0
    while not any(groups_are_adjacent(order) for order in reached):
        reached = {
            tuple(after(order, [pair])) for order in reached for pair in combinations(range(len(keys)), 2)
        } - seen
        seen = seen | reached
        count += 1
    return count


def small_batches() -> Iterator[tuple[RowKey, ...]]:
    """Return all batches of up to six rows with up to three groups, up to the groups' names."""
    for rows in range(7):
        for keys in product((NONE, A, B, C), repeat=rows):
            names = [key for key in dict.fromkeys(keys) if key]
            if names == sorted(names):
                yield keys


@given(KEYS)
def test_groups_become_adjacent(keys: list[RowKey]) -> None:
    swaps = adjacent_swaps(keys)
    assert groups_are_adjacent(after(keys, swaps))


@given(KEYS)
def test_adjacent_groups_need_no_swaps(keys: list[RowKey]) -> None:
    assert adjacent_swaps(after(keys, adjacent_swaps(keys))) == []
    if groups_are_adjacent(keys):
        assert adjacent_swaps(keys) == []


@given(KEYS)
def test_each_swap_places_a_row_and_the_last_one_two(keys: list[RowKey]) -> None:
    swaps = adjacent_swaps(keys)
    rows, final = list(keys), after(keys, swaps)
    misplaced = sum(key != belongs for key, belongs in zip(rows, final, strict=True))
    assert len(swaps) <= max(0, misplaced - 1)
    for swap in swaps:
        rows = after(rows, [swap])
        fewer = sum(key != belongs for key, belongs in zip(rows, final, strict=True))
        assert fewer < misplaced
        misplaced = fewer
    assert misplaced == 0


def test_swaps_are_close_to_the_minimum() -> None:
    total = least = 0
    for keys in small_batches():
        swaps, fewest = len(adjacent_swaps(keys)), least_swaps(keys)
        assert fewest <= swaps <= fewest + 2
        total, least = total + swaps, least + fewest
    assert total < 1.25 * least


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], []),
        ([NONE, NONE], []),
        ([A, NONE, NONE, B, B, NONE], []),
        ([A, B, A], [(1, 2)]),
        # One swap puts both rows in place.
        ([A, A, B, A, B, B], [(2, 3)]),
        ([A, A, A, B, B, A, B, A, B, B], [(3, 7), (4, 5)]),
        # A row without a group is swapped with one that was added at the end.
        ([A, A, NONE, NONE, B, B, NONE, C, C, A], [(2, 9)]),
        # One row of B filled a gap within group A: the others stay where they are.
        ([A, B, A, A, B, B, B], [(1, 3)]),
        ([B, A, A, A, NONE, B, B, B], [(0, 4)]),
        # Second processors: adjacent within the rows that share the first.
        ([(*A, *B), (*A, *C), (*A, *B), A, B], [(1, 2)]),
        ([(*A, *B), (*C, *B), A], [(1, 2)]),
    ],
)
def test_examples(keys: list[RowKey], expected: list[tuple[int, int]]) -> None:
    assert sorted(tuple(sorted(swap)) for swap in adjacent_swaps(keys)) == expected


def test_addition_needs_at_most_one_swap_per_other_group() -> None:
    keys = [key for key in (A, B, C, ("d",), ("e",)) for _ in range(50)]
    assert len(adjacent_swaps([*keys, A])) <= 4


def test_long_processor_list_does_not_recurse() -> None:
    long = tuple(str(number) for number in range(3000))
    keys = [NONE, long, long[:2000], long]
    assert after(keys, adjacent_swaps(keys)) == [NONE, long, long, long[:2000]]
