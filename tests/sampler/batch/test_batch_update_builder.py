from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitship.sampler.batch.batch_update_builder import BatchUpdateBuilder
from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest
from logitship.sampler.sampling_params import SamplingParams

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


@settings(deadline=None)
@given(st.sets(st.integers(0, 50)), st.integers(0, 60))
def test_popped_and_remaining_rows_are_disjoint(rows: set[int], pops: int) -> None:
    builder = builder_of(*rows)
    popped = [row for row in (builder.pop_removed() for _ in range(pops)) if row is not None]
    assert popped == sorted(rows)[:pops]
    assert builder.removed == sorted(rows - set(popped), reverse=True)
