"""Calls that begin before their logits exist, inside vLLM: when they do, and what happens if the step goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.seat import EngineWorker
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.batch_seat import BatchSeat
from logitship.server.vllm.settings import VllmSettings, logger

from .conftest import MakeBatch
from .early_executor import EarlyExecutor, EarlyRun
from .fake_runner import FAULT_TOKEN, VOCAB_SIZE, OneRank, Record, Runner, add_to_row_0, is_ended

RequestOf = Callable[..., Record]


@pytest.fixture
def runner() -> Runner:
    return Runner(0, is_async=False)


@pytest.fixture
def batch(early_executor: EarlyExecutor, make_batch: MakeBatch, runner: Runner) -> BatchSeat:
    return make_batch(runner)


def plan(runner: Runner, batch: BatchSeat, removed: list[int] | None = None, **counts: int) -> torch.Tensor:
    """Plan a step that computes so many tokens of each request, and return its logits, which are all 0.

    The last rows can be removed before. Waiting requests get the next ones.
    """
    added = []
    for row in removed or ():
        del runner.requests[runner.rows.pop(row).req_id]
    for record in runner.waiting:
        runner.requests[record.req_id] = record
        added.append((len(runner.rows), record.sampling_params, record.prompt_token_ids, record.output_token_ids))
        runner.rows.append(record)
    runner.waiting = []
    runner.input_batch.req_ids = [record.req_id for record in runner.rows]
    runner.input_batch.req_output_token_ids = [record.output_token_ids for record in runner.rows]
    update = None
    if removed or added:
        update = SimpleNamespace(batch_size=len(runner.rows), removed=removed or [], added=added, moved=[])
    runner.update_states(batch, update, SimpleNamespace(num_scheduled_tokens=counts))
    return torch.zeros(len(runner.rows), VOCAB_SIZE)


def sample(runner: Runner, batch: BatchSeat, logits: torch.Tensor) -> list[int]:
    """Run the processors, and append the tokens of rows that are not discarded."""
    batch.apply(logits)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, record in enumerate(runner.rows):
        if not runner.discard_request_mask.np[row]:
            record.sampled.append(tokens[row])
            record.output_token_ids.append(tokens[row])
    return tokens


def test_calls_begin_before_the_logits_exist(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    """The processor checks the history of each call."""
    runner.waiting = [request_of("a"), request_of("b", first=20)]
    for step in range(3):
        logits = plan(runner, batch, **dict.fromkeys("ab", 1 if step else 3))
        assert early_executor.num_early == step + 1
        assert len(early_executor.unfinished) == 1
        assert sample(runner, batch, logits) == [2 + step, 20 + step]
        assert early_executor.num_early == step + 1
        assert not early_executor.unfinished


def test_partly_computed_prompt_is_no_call(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    a, b = request_of("a"), request_of("b", first=20)
    runner.waiting = [a, b]
    assert sample(runner, batch, plan(runner, batch, a=3, b=2))[0] == 2
    assert b.output_token_ids == []
    assert sample(runner, batch, plan(runner, batch, a=1, b=1)) == [3, 20]
    assert early_executor.num_early == 2


def test_calls_begin_with_logits_if_the_plan_is_not_found(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    logits = add_to_row_0(runner, batch, request_of("a"))
    batch.begin()
    assert early_executor.num_early == 0
    batch.apply(logits)
    assert logits.argmax() == 2


@pytest.mark.parametrize("removed", [False, True])
def test_step_without_logits_ends_its_requests(
    runner: Runner,
    batch: BatchSeat,
    request_of: RequestOf,
    early_executor: EarlyExecutor,
    processors: PluginProcessors,
    removed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It failed, or vLLM sampled nothing. The processor has been called for a token that was not sampled."""
    a, b = request_of("a"), request_of("b", first=20)
    runner.waiting = [b, a]
    sample(runner, batch, plan(runner, batch, a=3, b=3))
    plan(runner, batch, a=1, b=1)
    assert len(early_executor.unfinished) == 1
    a.computed, b.computed = 3, 3
    logits = plan(runner, batch, removed=[1], b=1) if removed else plan(runner, batch, a=1, b=1)
    assert not early_executor.unfinished
    batch.apply(logits)
    assert all(is_ended(row[None]) for row in logits)
    assert early_executor.num_early == 2
    assert "request b ends with stop_reason 63: vLLM did not sample the token" in caplog.text
    assert processors.in_use == (1 if removed else 2)


def test_row_that_was_not_planned_ends_the_requests_that_began(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    """The mask disagrees with the plan about the token of b."""
    runner.waiting = [request_of("a"), request_of("b", first=20)]
    logits = plan(runner, batch, a=3, b=2)
    runner.discard_request_mask.np[1] = False
    batch.apply(logits)
    assert is_ended(logits[:1])
    assert logits[1].argmax() == 20
    assert not early_executor.unfinished


def test_planned_row_that_is_not_sampled_ends_alone(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    """The call goes on for the other row."""
    a, b = request_of("a"), request_of("b", first=20)
    runner.waiting = [a, b]
    logits = plan(runner, batch, a=3, b=3)
    runner.discard_request_mask.np[1] = True
    batch.apply(logits)
    assert logits[0].argmax() == 2
    assert not logits[1].any()
    a.output_token_ids.append(2)
    logits = plan(runner, batch, a=1, b=0)
    batch.apply(logits)
    assert logits[0].argmax() == 3
    assert is_ended(logits[1:])
    assert not early_executor.unfinished


def test_history_that_grows_after_the_call_began_ends_the_request(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    record = request_of("a")
    runner.waiting = [record]
    logits = plan(runner, batch, a=3)
    record.output_token_ids.append(9)
    batch.apply(logits)
    assert is_ended(logits)
    assert not early_executor.unfinished


def test_missing_discard_mask_ends_begun_calls(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, early_executor: EarlyExecutor
) -> None:
    runner.waiting = [request_of("a")]
    logits = plan(runner, batch, a=3)
    del runner.discard_request_mask
    batch.apply(logits)
    assert is_ended(logits)
    assert not early_executor.unfinished


@pytest.mark.parametrize("method", ["begin", "apply"])
def test_internal_error_ends_begun_calls_and_is_not_raised(
    runner: Runner,
    batch: BatchSeat,
    request_of: RequestOf,
    early_executor: EarlyExecutor,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    begin = ShippedProcessors.begin

    def fail(self: ShippedProcessors, *_: Any) -> None:
        if method == "begin":
            begin(self)
        raise RuntimeError("a bug")

    runner.waiting = [request_of("a")]
    with monkeypatch.context() as patch:
        patch.setattr(ShippedProcessors, method, fail)
        logits = plan(runner, batch, a=3)
        assert len(early_executor.unfinished) == 1
        batch.apply(logits)
    assert is_ended(logits)
    runner.rows[0].output_token_ids.append(FAULT_TOKEN)
    plan(runner, batch, a=1)
    assert not early_executor.unfinished
    assert early_executor.num_early == 1


def test_other_ranks_begin_no_calls(
    settings: VllmSettings, model: ModelView, runner: Runner, request_of: RequestOf
) -> None:
    class OtherRank(OneRank):
        is_first = False

    batch = BatchSeat(EngineWorker(settings, model, OtherRank(), None, logger), BatchRequests(runner))
    runner.waiting = [request_of("a")]
    plan(runner, batch, a=3)
    assert batch._runtime._running == {}


def test_error_of_the_server_in_a_call_ends_its_rows_alone(
    runner: Runner, batch: BatchSeat, request_of: RequestOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = EarlyRun.finish

    def failing(run: EarlyRun, *args: Any) -> Any:
        if run._edited[0, 20] == 0.0:
            raise KeyError("an error of the server")
        return finish(run, *args)

    monkeypatch.setattr(EarlyRun, "finish", failing)
    runner.waiting = [request_of("a", first=20, fails_at=9), request_of("b", first=30)]
    logits = plan(runner, batch, a=3, b=3)
    sample(runner, batch, logits)
    assert is_ended(logits[:1])
    assert logits[1].argmax() == 30
