"""The table of transitions of a call. Calls in real sandboxes are in `tests/sampler/sandbox/test_promised_calls.py`."""

from __future__ import annotations

import pytest

from logitship.sampler.processors.call_state import TRANSITIONS, CallState, InvalidTransition


def reachable(state: CallState) -> set[CallState]:
    found = {state}
    while new := {after for each in found for after in TRANSITIONS[each]} - found:
        found |= new
    return found


@pytest.mark.parametrize("state", CallState)
def test_only_the_transitions_of_the_table_are_possible(state: CallState) -> None:
    for after in CallState:
        if after in TRANSITIONS[state]:
            assert state.next(after) is after
        else:
            with pytest.raises(InvalidTransition, match=f"a call that {state.value} cannot"):
                state.next(after)


@pytest.mark.parametrize("state", CallState)
def test_every_call_can_end(state: CallState) -> None:
    assert CallState.TAKEN in reachable(state)
    assert state not in {each for after in TRANSITIONS[state] for each in reachable(after)}


def test_every_state_can_be_reached() -> None:
    assert reachable(CallState.NEW) == set(CallState)


def test_open_calls_may_fail() -> None:
    assert all(CallState.FAILED in TRANSITIONS[state] for state in CallState if state.is_open)
