"""`RowDeferral` alone, and the requests that `BatchSeat` does not defer."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logitship.server.vllm.row_deferral import RowDeferral, find_engine_core
from tests.server.runtime.early_executor import EarlyExecutor
from tests.server.runtime.fake_engine import CHOICE, Job

from .fake_vllm import Record, VllmV1


def start_late() -> tuple[VllmV1, Record, Record]:
    """Return an engine whose next call will not end, and two requests, of which the first has a processor."""
    executor = EarlyExecutor()
    executor.delays = [math.inf]
    fake = VllmV1(executor)
    late, plain = fake.start(Job("late"), Job("plain", first=None))
    return fake, late, plain


def test_token_of_the_step_is_taken_back() -> None:
    """The request's generator of random numbers is not used for it."""
    fake, late, plain = start_late()
    fake.begin({late: 3, plain: 3})
    row = fake.rows.index(late)
    fake.input_batch.generators = {row: "late", 1 - row: "plain"}
    request = fake.scheduler.requests["late"]
    request.num_output_placeholders = 2
    assert fake.sampled(late, plain) == [None, CHOICE]
    assert fake.input_batch.generators == {1 - row: "plain"}
    assert (request.num_computed_tokens, request.num_output_placeholders) == (2, 1)
    assert request.next_decode_eligible_step > 1 << 60


def no_engine_core(fake: VllmV1) -> None:
    fake.seat._deferral = RowDeferral(fake, None)


def other_scheduler(fake: VllmV1) -> None:
    fake.scheduler = SimpleNamespace()  # type: ignore[assignment]


class MambaSpec:
    """Fake of vLLM's class of this name."""


def with_state(fake: VllmV1) -> None:
    fake.scheduler.kv_cache_config.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=MambaSpec()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_engine_core, "vLLM's scheduler is not in the process of the model runner"),
        (other_scheduler, "logitship does not know the scheduler types.SimpleNamespace"),
        (with_state, "a token cannot be computed again in a cache of MambaSpec"),
        (lambda fake: setattr(fake.scheduler, "connector", object()), "vLLM's scheduler has a connector"),
        (lambda fake: setattr(fake.scheduler, "lora_config", object()), "vLLM's scheduler has a lora_config"),
        (lambda fake: delattr(fake.input_batch, "generators"), "logitship does not know this vLLM"),
        (lambda fake: delattr(fake, "num_prompt_logprobs"), "logitship does not know this vLLM"),
    ],
)
def test_requests_end_where_they_cannot_sit_out(
    change: Callable[[VllmV1], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake, late, plain = start_late()
    change(fake)
    assert fake.step(late, plain) == [None, CHOICE]
    assert "processor ChecksHistory is too slow" in fake.ends["late"]
    assert fake.is_failed(late)
    assert f"cannot sit steps out: {reason}" in caplog.text


@pytest.mark.parametrize("has_prompt_logprobs", [True, False])
def test_request_that_would_lose_something_ends(has_prompt_logprobs: bool) -> None:
    """The log-probabilities of its prompt, or the state of its thinking budget."""
    fake, late, plain = start_late()
    if has_prompt_logprobs:
        fake.num_prompt_logprobs["late"] = 1
    else:
        late.sampling_params.thinking_token_budget = 5
    assert fake.step(late, plain) == [None, CHOICE]
    assert "processor ChecksHistory is too slow" in fake.ends["late"]


def test_aborted_request_is_discarded() -> None:
    """VLLM's scheduler has dropped it, and tells the model runner with the next step."""
    fake, late, plain = start_late()
    fake.begin({late: 3, plain: 3})
    del fake.scheduler.requests["late"]
    row = fake.rows.index(late)
    fake.discard_request_mask.np[:] = False
    assert fake.seat.defer({row: fake.seat._requests["late"].tracked}) == {row}
    assert fake.discard_request_mask.np[row]
    fake.seat._deferral.resume("late")


class EngineCore:
    """Fake of vLLM's class of this name."""

    def make(self, backend: str) -> Any:
        config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
        return find_engine_core(config)


def test_engine_core_is_found_in_its_own_process() -> None:
    core = EngineCore()
    assert core.make("uni") is core
    assert core.make("mp") is None
