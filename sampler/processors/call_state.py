"""The life of a call whose processor runs elsewhere: its states, and the transitions between them.

| what happens | transition |
|---|---|
| the call begins | NEW → RECORDING without logits, RUNNING with them |
| the processor uses a value | RECORDING → READING |
| `Run.provide` | RECORDING, READING → RUNNING |
| `Run.defer` | RUNNING → DEFERRED |
| the answer comes | RECORDING, RUNNING, DEFERRED → RECORDED with edits, EDITED with rows |
| the process dies or takes too long, or the server fails | NEW, RECORDING, RUNNING, DEFERRED → FAILED |
| `Run.finish` | RECORDED, EDITED, FAILED → TAKEN |

A processor that uses a value after `provide` gets the rows at once: its call stays RUNNING. A step that is aborted, or
needs no result any more, provides zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class CallState(Enum):
    """The state of a call; its value says what that is."""

    NEW = "has not begun"
    RECORDING = "records edits, because its logits do not exist yet"
    READING = "uses a value of its logits, which do not exist yet"
    RUNNING = "has its logits, and a step waits for it"
    DEFERRED = "has its logits, and no step waits for it"
    RECORDED = "ended with edits, which need no logits"
    EDITED = "ended with edited rows, except for those with a fault"
    FAILED = "ended with a fault of each row: its process died or took too long, or the server failed"
    TAKEN = "its result was taken"

    @property
    def is_open(self) -> bool:
        """True if the processor computes, so that an answer may come."""
        return self in _OPEN

    def next(self, state: CallState) -> CallState:
        """Return the state that follows.

        Raises:
            InvalidTransition: it cannot follow, see `TRANSITIONS`.
        """
        if state not in TRANSITIONS[self]:
            raise InvalidTransition(f"a call that {self.value} cannot become one that {state.value}")
        return state


_OPEN = frozenset({CallState.RECORDING, CallState.RUNNING, CallState.DEFERRED})
_ENDED = frozenset({CallState.RECORDED, CallState.EDITED, CallState.FAILED})

TRANSITIONS: Mapping[CallState, frozenset[CallState]] = {
    CallState.NEW: frozenset({CallState.RECORDING, CallState.RUNNING, CallState.FAILED}),
    CallState.RECORDING: _ENDED | {CallState.READING, CallState.RUNNING},
    CallState.READING: frozenset({CallState.RUNNING}),
    CallState.RUNNING: _ENDED | {CallState.DEFERRED},
    CallState.DEFERRED: _ENDED,
    CallState.RECORDED: frozenset({CallState.TAKEN}),
    CallState.EDITED: frozenset({CallState.TAKEN}),
    CallState.FAILED: frozenset({CallState.TAKEN}),
    CallState.TAKEN: frozenset(),
}
"""The states that may follow each state."""


class InvalidTransition(Exception):
    """An error of the server: it ends the rows of the call with a fault of the kind `internal`, see `GuardedRun`."""
