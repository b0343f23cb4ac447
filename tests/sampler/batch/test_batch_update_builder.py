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


def test_removed_descends() -> None:
    assert builder_of(1, 5, 0, 3).removed == [5, 3, 1, 0]


def test_pop_and_peek_give_the_lowest() -> None:
    builder = builder_of(4, 1, 3)
    assert builder.has_removed()
    assert (builder.peek_removed(), builder.pop_removed(), builder.peek_removed()) == (1, 1, 3)
    assert builder.removed == [4, 3]
    assert (builder.pop_removed(), builder.pop_removed(), builder.pop_removed()) == (3, 4, None)
    assert builder.peek_removed() is None
    assert not builder.has_removed()


@pytest.mark.parametrize("read", ["removed", "peek_removed", "pop_removed"])
def test_no_removal_after_the_removals_were_read(read: str) -> None:
    builder = builder_of(2)
    value: Any = getattr(builder, read)
    if callable(value):
        value()
    with pytest.raises(RuntimeError, match="row 7 can no longer be removed in this step"):
        builder.removed_append(7)
    assert 7 not in builder.removed


@pytest.mark.parametrize("end", ["reset", "get_and_reset"])
def test_the_next_step_removes_again(end: str) -> None:
    builder = builder_of(2)
    assert builder.removed == [2]
    if end == "reset":
        builder.reset()
    else:
        builder.get_and_reset(0)
    builder.removed_append(7)
    assert builder.removed == [7]


def test_a_look_for_removals_where_there_are_none_is_no_reading() -> None:
    """So that an addition at the end of the batch does not forbid a removal, as in vLLM."""
    builder = BatchUpdateBuilder()
    assert builder.peek_removed() is None
    assert builder.pop_removed() is None
    builder.removed_append(3)
    assert builder.removed == [3]


def test_the_update() -> None:
    builder = builder_of(1, 4, 3)
    assert builder.pop_removed() == 1
    builder.added.append(ADDED)
    builder.moved.append(MOVED)
    assert builder.get_and_reset(9) == BatchUpdate(9, [4, 3], [ADDED], [MOVED])
    assert builder.get_and_reset(9) is None


def test_removals_are_sorted_though_nobody_read_them() -> None:
    update = builder_of(0, 2, 1).get_and_reset(0)
    assert update is not None
    assert update.removed == [2, 1, 0]


@pytest.mark.parametrize("kind", ["removed", "added", "moved"])
def test_one_change_of_any_kind_makes_an_update(kind: str) -> None:
    builder = BatchUpdateBuilder(**{kind: [{"removed": 0, "added": ADDED, "moved": MOVED}[kind]]})  # type: ignore[arg-type]
    assert builder.get_and_reset(1) is not None


def test_a_removal_that_an_addition_filled_leaves_an_update_without_removals() -> None:
    builder = builder_of(0)
    builder.pop_removed()
    builder.added.append(ADDED)
    assert builder.get_and_reset(1) == BatchUpdate(1, [], [ADDED], [])


def test_an_update_keeps_its_lists() -> None:
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


def test_reset_says_whether_the_batch_changed() -> None:
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
def test_what_is_popped_and_what_is_left_are_disjoint(rows: set[int], pops: int) -> None:
    builder = builder_of(*rows)
    popped = [row for row in (builder.pop_removed() for _ in range(pops)) if row is not None]
    assert popped == sorted(rows)[:pops]
    assert builder.removed == sorted(rows - set(popped), reverse=True)
