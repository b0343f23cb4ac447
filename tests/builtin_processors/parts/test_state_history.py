from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from logitship.builtin_processors.parts.state_history import StateHistory

tokens = st.lists(st.integers(0, 2), max_size=12)


def step(state: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*state, token)


@given(st.lists(st.tuples(st.integers(0, 12), tokens), max_size=8))
def test_state_follows_tokens(changes: list[tuple[int, list[int]]]) -> None:
    """Tokens are removed and appended, with a call in between, which detects that there are fewer."""
    history, output = StateHistory[tuple[int, ...]](()), []
    for kept, new in changes:
        del output[kept:]
        assert history.follow(output, step) == tuple(output)
        output += new
        assert history.follow(output, step) == tuple(output)


def test_replaced_last_token_is_detected() -> None:
    history = StateHistory[tuple[int, ...]](())
    assert history.follow([1, 2, 3], step) == (1, 2, 3)
    assert history.follow([1, 2, 4, 5], step) == (1, 2, 4, 5)


def test_only_new_tokens_are_read() -> None:
    read: list[int] = []

    def count(state: int, token: int) -> int:
        read.append(token)
        return state + 1

    history = StateHistory(0)
    output = list(range(100))
    assert history.follow(output, count) == 100
    del read[:]
    output.append(7)
    assert history.follow(output, count) == 101
    assert read == [7]


def test_copies_are_independent() -> None:
    history = StateHistory[tuple[int, ...]](())
    history.follow([1], step)
    fork = copy.deepcopy(history)
    assert history.follow([1, 2], step) == (1, 2)
    assert fork.follow([1, 3], step) == (1, 3)


def test_length_during_step() -> None:
    history, places = StateHistory(0), list[int]()

    def note(state: int, token: int) -> int:
        places.append(len(history))
        return state

    history.follow([5, 6, 7], note)
    history.follow([5, 8], note)
    assert places == [0, 1, 2, 1]
    assert len(history) == 2
