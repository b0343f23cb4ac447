"""The plugin on a fake of vLLM's model runner V1 that schedules at random, as vLLM may."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.request_view import ModelView
from logitship.server.vllm.batch_requests import BatchRequests
from logitship.server.vllm.shipped_batch import ShippedBatch
from logitship.server.vllm.vllm_processors import VllmProcessors
from tests.helpers.random_cases import random_seeds

from .conftest import MakeBatch, MakeParams, NewProcessors
from .early_executor import EarlyExecutor
from .fake_runner import FAULT_TOKEN, VOCAB_SIZE, Record, Runner, add_to_row_0, alone, is_ended, run


@pytest.mark.parametrize(("is_async", "share"), [(False, 0.0), (False, 0.8), (True, 0.8)])
@random_seeds(12, shares_fixtures=True)
def test_histories_are_exact_in_every_schedule(
    seed: int,
    is_async: bool,
    share: float,
    new_processors: NewProcessors,
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    vllm_params: MakeParams,
) -> None:
    """Covers prompt chunks, preempted requests, moves, placeholders, one step too many, faults, and early calls."""
    early_executor = EarlyExecutor()
    early_executor.share = share
    processors = new_processors(early_executor)
    rng = random.Random(seed)
    runner = Runner(seed, is_async)
    records: list[Record] = []
    expected: dict[str, list[int]] = {}
    for number in range(24):
        req_id, prompt, tokens, first = str(number), rng.randint(1, 9), rng.randint(1, 20), rng.randint(2, 40)
        kind = rng.choice(["plain", "runs", "runs", "fails"])
        if kind == "plain":
            sampling = vllm_params(max_tokens=tokens, stop_token_ids=[FAULT_TOKEN])
            records.append(Record(req_id, sampling, [7] * prompt))
            expected[req_id] = alone(records[-1])
        else:
            fails_at = rng.randrange(tokens) if kind == "fails" else None
            records.append(request_of(req_id, prompt, tokens, first=first, fails_at=fails_at))
            forced = list(range(first, first + tokens))
            expected[req_id] = forced if fails_at is None else [*forced[:fails_at], FAULT_TOKEN]
    batch = make_batch(runner, processors)
    assert run(runner, batch, *records) == expected
    assert processors.in_use == 0
    assert not batch._kept
    assert bool(early_executor.num_early) == (share > 0 and not is_async)
    assert not early_executor.unfinished


@pytest.mark.parametrize(("tokens", "stop"), [(4, []), (8, [5])], ids=["its_length", "a_stop_token"])
def test_processor_is_not_called_after_the_end(
    make_batch: MakeBatch,
    request_of: Callable[..., Record],
    tokens: int,
    stop: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine computes one step more than it needs, before it knows the token that ended the request."""
    runner = Runner(0, is_async=True)
    record = request_of("x", tokens=tokens, fails_at=4)
    record.sampling_params.stop_token_ids += stop
    assert run(runner, make_batch(runner), record)["x"] == [2, 3, 4, 5]
    assert not caplog.messages


def test_fault_is_logged_once(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=True)
    with caplog.at_level(logging.ERROR, "vllm.logitship"):
        finished = run(runner, make_batch(runner), request_of("r-1", fails_at=2))
    assert finished["r-1"] == [2, 3, FAULT_TOKEN]
    (message,) = caplog.messages
    assert message.startswith(
        "request r-1 ends with stop_reason 63: processor ChecksHistory raised RuntimeError: requested"
    )
    assert "Traceback" in message


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


def test_load_error_ends_the_request(
    make_batch: MakeBatch, request_of: Callable[..., Record], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    record = request_of("x")
    record.sampling_params.extra_args = {"custom_logit_processor": '{"name": "nothing"}'}
    logits = add_to_row_0(runner, batch, record)
    batch.apply(logits)
    assert is_ended(logits)
    assert "no processor is installed or registered as 'nothing'" in caplog.text


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


def test_internal_error_ends_requests_and_is_not_raised(
    make_batch: MakeBatch, request_of: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(0, is_async=False)
    batch = make_batch(runner)
    logits = add_to_row_0(runner, batch, request_of("x"))

    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("logitship.server.vllm.shipped_batch.ShippedProcessors.apply", fail)
    batch.apply(logits)
    assert is_ended(logits)


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

    def __init__(self, is_first: bool, written: list[torch.Tensor]) -> None:
        self.is_first = is_first
        self._written = written

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        if self.is_first:
            self._written.append(logits[rows].clone())
        else:
            logits[rows] = self._written.pop(0)


def test_other_ranks_receive_the_rows_of_the_first(
    model: ModelView, processors: VllmProcessors, request_of: Callable[..., Record]
) -> None:
    written: list[torch.Tensor] = []
    results = []
    for is_first in (True, False):
        runner = Runner(0, is_async=False)
        batch = ShippedBatch(
            model,
            torch.device("cpu"),
            processors if is_first else None,
            BatchRequests(runner),
            FAULT_TOKEN,
            Rank(is_first, written),
        )
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
