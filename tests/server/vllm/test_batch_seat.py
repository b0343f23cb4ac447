"""The plugin on a fake of vLLM's model runner V1 that schedules at random, as vLLM may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.request_view import ModelView
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.seat import EngineWorker
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.batch_seat import BatchSeat
from logitship.server.vllm.settings import VllmSettings, logger

from .conftest import MakeBatch, MakeParams
from .fake_runner import FAULT_TOKEN, VOCAB_SIZE, Record, Runner, add_to_row_0, alone, is_ended, run


def test_request_id_is_reused(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    """The second is a new request: vLLM may replace the first in the same step."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    assert run(runner, batch, request_of("x"))["x"] == list(range(2, 10))
    runner.finished.clear()
    assert run(runner, batch, request_of("x", prompt=5))["x"] == list(range(2, 10))


def test_placeholder_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=True)
    batch = make_batch(runner)
    record = request_of("x")
    batch.apply(add_to_row_0(runner, batch, record))
    record.output_token_ids.append(-1)
    logits = torch.zeros(1, VOCAB_SIZE)
    batch.update_state(None)
    batch.apply(logits)
    assert is_ended(logits)
    assert "--logits-processors" in caplog.text


def test_shortened_output_ends_the_request(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    batch.apply(add_to_row_0(runner, batch, record))
    record.output_token_ids.append(2)
    batch.apply(torch.zeros(1, VOCAB_SIZE))
    record.output_token_ids.clear()
    logits = torch.zeros(1, VOCAB_SIZE)
    batch.apply(logits)
    assert is_ended(logits)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": None},
        {"prompt_is_token_ids": [True, False, True]},
    ],
)
def test_prompt_embeddings_end_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], change: dict[str, Any]
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    for name, value in change.items():
        setattr(record, name, value)
    logits = add_to_row_0(runner, batch, record)
    batch.apply(logits)
    assert is_ended(logits)


def test_request_without_an_allowed_token_ends_alone(
    make_batch: MakeBatch, request_of: Callable[..., Record], vllm_params: MakeParams
) -> None:
    """The client may allow only the fault token, and name no processor that could be blamed for it."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    blocked = Record("x", vllm_params({"logits_processors": "[]"}, allowed_token_ids=[FAULT_TOKEN]), [7])
    other = request_of("y")
    add_to_row_0(runner, batch, blocked)
    runner.requests["y"] = other
    runner.input_batch.req_ids.append("y")
    runner.input_batch.req_output_token_ids.append(other.output_token_ids)
    batch.update_state(BatchUpdate(2, [], [(1, other.sampling_params, [7] * 3, other.output_token_ids)], []))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, :FAULT_TOKEN] = -torch.inf
    batch.apply(logits)
    assert is_ended(logits[:1])
    assert logits[1].argmax() == 2
    assert logits[1, 2] == 0


def test_processor_cannot_force_the_fault_token(make_batch: MakeBatch, request_of: Callable[..., Record]) -> None:
    """Neither the model nor a processor may choose it; without another token, the request ends."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x", first=FAULT_TOKEN))
    batch.apply(logits)
    assert is_ended(logits)


@pytest.mark.parametrize("is_hard", [True, False])
def test_forced_token_obeys_hard_masks(
    make_batch: MakeBatch, request_of: Callable[..., Record], is_hard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The mask of vLLM was applied before."""
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x", first=4)
    record.sampling_params.allowed_token_ids = [5, 6] if is_hard else None
    logits = add_to_row_0(runner, batch, record)
    logits[0, :5] = -torch.inf
    batch.apply(logits)
    assert is_ended(logits) == is_hard
    assert (logits[0, 4] == 0) == (not is_hard)
    assert ("left no token of those that allowed_token_ids" in caplog.text) == is_hard


def test_untrackable_request_ends_and_others_run(
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    vllm_params: MakeParams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rows after it and the moves of that step are applied."""
    request_of_list = BatchRequests.request_of

    def fail_for_one(self: BatchRequests, output_token_ids: list[int]) -> Any:
        record = request_of_list(self, output_token_ids)
        if record.req_id == "broken":
            raise LookupError("a bug")
        return record

    monkeypatch.setattr(BatchRequests, "request_of", fail_for_one)
    for seed in range(8):
        runner = Runner(seed, is_async=bool(seed % 2))
        plain = Record("plain", vllm_params(max_tokens=8, stop_token_ids=[FAULT_TOKEN]), [7] * 3)
        records = [request_of("broken"), plain, request_of("x", first=20), request_of("y", first=30)]
        assert run(runner, make_batch(runner), *records) == {
            "broken": [FAULT_TOKEN],
            "plain": alone(plain),
            "x": list(range(20, 28)),
            "y": list(range(30, 38)),
        }
    assert "LookupError: a bug" in caplog.text
    assert "request (unknown) ends with stop_reason 63" in caplog.text


def test_missing_discard_mask_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x"))
    del runner.discard_request_mask
    batch.apply(logits)
    assert is_ended(logits)


class Rank:
    """One of two ranks: `broadcast` copies the rows of the first to the other."""

    size = 2

    def __init__(self, is_first: bool, written: list[torch.Tensor]) -> None:
        self.is_first = is_first
        self._written = written

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        if self.is_first:
            self._written.append(logits[rows].clone())
        else:
            logits[rows] = self._written.pop(0)


def test_other_ranks_receive_the_rows_of_the_first(
    settings: VllmSettings, model: ModelView, processors: PluginProcessors, request_of: Callable[..., Record]
) -> None:
    written: list[torch.Tensor] = []
    results = []
    for is_first in (True, False):
        runner = Runner(0, is_async=False)
        worker = EngineWorker(settings, model, Rank(is_first, written), processors if is_first else None, logger)
        batch = BatchSeat(worker, BatchRequests(runner))
        record = request_of("x", fails_at=1)
        steps = [add_to_row_0(runner, batch, record)]
        batch.apply(steps[0])
        record.output_token_ids.append(int(steps[0].argmax()))
        steps.append(torch.zeros(1, VOCAB_SIZE))
        batch.update_state(None)
        batch.apply(steps[1])
        results.append(torch.cat(steps))
    assert torch.equal(*results)
    assert results[0].argmax(dim=-1).tolist() == [2, FAULT_TOKEN]
    assert not written
