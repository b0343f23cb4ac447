from __future__ import annotations

import copy
import random

import torch

from logitship.builtin_processors.parts.step_states import STEPS_KEPT, RowState, StepStates, as_batch


def state(number: float) -> RowState:
    return RowState(torch.tensor([[number]], dtype=torch.float64), 0)


def number_of(row_state: RowState) -> float:
    return float(row_state.batch[row_state.row, 0])


def test_removed_tokens_within_limit() -> None:
    """Compared with a dict of all states by number of tokens."""
    rng = random.Random(0)
    states, reference, length, longest = StepStates(state(-1)), {-1: -1.0}, 0, 0
    for step in range(2000):
        expected = reference[max(known for known in reference if known < length)]
        assert number_of(states.before(length)) == expected
        states.add(length, state(step))
        reference = {known: number for known, number in reference.items() if known < length} | {length: float(step)}
        longest = max(longest, length)
        back = rng.random() < 0.2
        length = max(longest - STEPS_KEPT + 2, length - rng.randrange(6), 0) if back else length + 1
    assert longest > 5 * STEPS_KEPT


def test_removed_tokens_beyond_limit() -> None:
    states = StepStates(state(-1))
    for length in range(100):
        states.before(length)
        states.add(length, state(length))
    oldest = 100 - STEPS_KEPT - 1
    assert number_of(states.before(oldest + 1)) == oldest
    assert number_of(states.before(5)) == oldest


def test_repeated_step() -> None:
    states = StepStates(state(-1))
    states.add(0, state(0))
    assert number_of(states.before(0)) == -1
    states.add(0, state(1))
    assert number_of(states.before(1)) == 1


def test_copy_is_independent_and_shares_tensors() -> None:
    states = StepStates(state(-1))
    states.add(0, state(0))
    copied = copy.deepcopy({"any": states})["any"]
    assert copied.before(1).batch is states.before(1).batch
    copied.add(1, state(7))
    assert number_of(copied.before(2)) == 7
    assert number_of(states.before(2)) == 0


def test_as_batch() -> None:
    batch = torch.arange(6, dtype=torch.float64).view(3, 2)
    rows = [RowState(batch, row) for row in range(3)]
    assert as_batch(rows) is batch
    assert as_batch(rows[:2]).tolist() == [[0, 1], [2, 3]]
    assert as_batch([rows[2], rows[0], rows[1]]).tolist() == [[4, 5], [0, 1], [2, 3]]
    assert as_batch([rows[0], RowState(batch.clone(), 1), rows[2]]).tolist() == batch.tolist()
