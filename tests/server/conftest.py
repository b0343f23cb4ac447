from __future__ import annotations

import pytest

from logitship.server.model import attention

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
