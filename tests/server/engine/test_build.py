from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from logitship.server.engine import build
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.forward_pass import SEQUENCE_COST
from logitship.server.model import capacity
from logitship.server.model.kv_cache import block_bytes
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import ModelRunner, cache_shape


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


def test_prefix_cache_is_a_share_of_the_memory_before_the_slots(
    make_engine: Callable[..., AsyncEngine], loaded_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([1 << 20, 0])
    monkeypatch.setattr(capacity, "_free_bytes", lambda device: next(measured))
    nbytes = block_bytes(cache_shape(loaded_model.model, 1, 1), loaded_model.model.dtype)
    share = (1 << 19) // 10  # a tenth of --mem-fraction-static, 0.5
    assert make_engine(max_num_seqs=4).stats().prefix_blocks_capacity == share // nbytes
