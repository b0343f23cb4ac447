from __future__ import annotations

import random

import torch

from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import (
    BatchRows,
    ForcingLogitsProcessor,
    LogitsProcessors,
    process_dict_updates,
)
from logitship.sampler.sampling_params import SamplingParams
from tests.helpers.random_cases import random_seeds

UNIDIRECTIONAL, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


class Recorder(LogitsProcessor):
    def __init__(self, invariant: bool) -> None:
        self.invariant = invariant
        self.updates: list[BatchUpdate | None] = []

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)


class Forcer(Recorder, ForcingLogitsProcessor):
    pass


def test_split_keeps_order() -> None:
    a, b, c, d = Recorder(True), Recorder(False), Recorder(True), Recorder(False)
    e, f = Forcer(False), Forcer(False)
    processors = LogitsProcessors([a, e, b, c, f, d])
    assert processors.non_argmax_invariant == [b, d]
    assert processors.forcing == [e, f]
    assert processors.argmax_invariant == [a, c]
    assert list(processors.all) == [b, d, e, f, a, c]


def test_every_processor_gets_every_update() -> None:
    recorders = [Recorder(True), Recorder(False), Forcer(False)]
    processors = LogitsProcessors(recorders)
    update = BatchUpdate(0, [], [], [])
    processors.update_state(update)
    processors.update_state(None)
    assert [recorder.updates for recorder in recorders] == [[update, None]] * 3


def seed_if_even(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> int | None:
    assert params.seed is not None
    return params.seed if params.seed % 2 == 0 else None


def added(row: int, seed: int) -> AddedRequest:
    return row, SamplingParams(seed=seed), [], []


def test_no_update_changes_nothing() -> None:
    assert not BatchRows(seed_if_even).update(None)


def test_stateless_request_replaces_stateful_one() -> None:
    rows = BatchRows(seed_if_even)
    assert rows.update(BatchUpdate(1, [], [added(0, 2)], []))
    assert dict(rows) == {0: 2}
    assert rows.update(BatchUpdate(1, [], [added(0, 3)], []))
    assert dict(rows) == {}


def test_stateless_requests_do_not_count_as_change() -> None:
    rows = BatchRows(seed_if_even)
    assert not rows.update(BatchUpdate(2, [], [added(0, 1), added(1, 3)], []))
    assert not rows.update(BatchUpdate(2, [], [], [(0, 1, SWAP)]))
    assert not rows.update(BatchUpdate(1, [1], [], []))


def test_swap_with_stateless_row() -> None:
    rows = BatchRows(seed_if_even)
    rows.update(BatchUpdate(2, [], [added(0, 2), added(1, 3)], []))
    assert rows.update(BatchUpdate(2, [], [], [(0, 1, SWAP)]))
    assert dict(rows) == {1: 2}
    assert rows.update(BatchUpdate(2, [], [], [(0, 1, SWAP)]))
    assert dict(rows) == {0: 2}


def test_one_way_move_clears_source() -> None:
    rows = BatchRows(seed_if_even)
    rows.update(BatchUpdate(2, [], [added(0, 2), added(1, 4)], []))
    assert rows.update(BatchUpdate(1, [0], [], [(1, 0, UNIDIRECTIONAL)]))
    assert dict(rows) == {0: 4}


def test_process_dict_updates_keeps_falsy_state() -> None:
    """Falsy state, such as 0 or an empty list, is state."""
    entries: dict[int, int] = {}
    assert not process_dict_updates(entries, None, seed_if_even)
    assert process_dict_updates(entries, BatchUpdate(2, [], [added(0, 0), added(1, 1)], []), seed_if_even)
    assert process_dict_updates(entries, BatchUpdate(2, [], [], [(0, 1, SWAP)]), seed_if_even)
    assert entries == {1: 0}
    assert process_dict_updates(entries, BatchUpdate(1, [1], [], []), seed_if_even)
    assert entries == {}


def test_discard_if() -> None:
    rows = BatchRows(seed_if_even)
    rows.update(BatchUpdate(2, [], [added(0, 2), added(1, 4)], []))
    assert rows.discard_if(lambda seed: seed == 4)
    assert not rows.discard_if(lambda seed: seed == 4)
    assert dict(rows) == {0: 2}


@random_seeds(30)
def test_random_schedules_match_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 8
    plain: list[int | None] = [None] * capacity
    rows = BatchRows(seed_if_even)
    for step in range(40):
        free = [row for row in range(capacity) if plain[row] is None]
        used = [row for row in range(capacity) if plain[row] is not None]
        removed = rng.sample(used, rng.randint(0, min(2, len(used))))
        arriving = rng.sample(free, rng.randint(0, min(2, len(free))))
        additions = [added(row, 100 * step + row) for row in arriving]
        for row in removed:
            plain[row] = None
        for row, params, _, _ in additions:
            plain[row] = params.seed
        moved = []
        for _ in range(rng.randint(0, 3)):
            source, target = rng.sample(range(capacity), 2)
            if plain[source] is not None and plain[target] is None:
                moved.append((source, target, UNIDIRECTIONAL))
                plain[target], plain[source] = plain[source], None
            elif plain[source] is not None and plain[target] is not None:
                moved.append((source, target, SWAP))
                plain[target], plain[source] = plain[source], plain[target]
        before = dict(rows)
        changed = rows.update(BatchUpdate(capacity, removed, additions, moved))
        expected = {row: seed for row, seed in enumerate(plain) if seed is not None and seed % 2 == 0}
        assert dict(rows) == expected
        assert changed or before == expected
