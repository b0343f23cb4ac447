from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from logitship.server.engine import build
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.decode_shares import SEQUENCE_COST
from logitship.server.model.model_runner import ModelRunner


@pytest.mark.parametrize(("max_num_seqs", "measured"), [(32, {1, 17}), (4, {1, 4}), (1, {1})])
def test_the_time_of_a_step_is_measured_at_the_start(
    max_num_seqs: int, measured: set[int], make_engine: Callable[..., AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes 10 ms and 2 for each sequence, which takes 2 more outside of it."""

    def measure(runner: ModelRunner, numbers: Iterable[int]) -> dict[int, float]:
        assert set(numbers) == measured
        return {number: 0.010 + 0.002 * number for number in measured}

    monkeypatch.setattr(build, "measure_passes", measure)
    time = make_engine(max_num_seqs=max_num_seqs)._shares.decode.time
    assert time.expected(SEQUENCE_COST) == pytest.approx(0.012)
    if max_num_seqs > 1:
        assert time.expected(10 * SEQUENCE_COST) == pytest.approx(0.012 + 9 * 0.004)
