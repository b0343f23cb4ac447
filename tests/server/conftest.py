from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model import attention

PATIENCE = 60.0

COSTS = {
    "one by one": (0, {"_CALL_COST": 0, "_TOKEN_COST": 10}),
    "all at once": (1, {"_CALL_COST": 10**9}),
    "drafts apart": (2, {"_GATHER_COST": -(10**9)}),
}


@pytest.fixture(params=COSTS)
def num_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Forces one attention layout of a step; returns the number of calls for all decoding sequences."""
    number, costs = COSTS[request.param]
    for name, value in costs.items():
        monkeypatch.setattr(attention, name, value)
    return number


@pytest.fixture
def hold_engine() -> Callable[[AsyncEngine], AbstractContextManager[None]]:
    """Blocks the thread of an engine, as a processor that does not return."""

    @contextmanager
    def held(engine: AsyncEngine) -> Iterator[None]:
        reached, released = threading.Event(), threading.Event()

        def hold() -> None:
            reached.set()
            assert released.wait(PATIENCE)

        engine._thread.post(hold)
        assert reached.wait(PATIENCE)
        try:
            yield
        finally:
            released.set()

    return held
