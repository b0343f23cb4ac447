"""`BatchSeat` alone, and `VllmSeat`: the fault token, masks, and the records of model runner V1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.server.vllm.batch_requests import BatchRequests
from tests.server.runtime.early_executor import EarlyExecutor
from tests.server.runtime.fake_engine import CHOICE, FAULT_TOKEN, VOCAB_SIZE, FakeGroup, Job

from .fake_vllm import Record, VllmV1, VllmV1Async


def test_request_id_is_reused() -> None:
    """The second is a new request: vLLM may replace the first in the same step."""
    fake = VllmV1()
    for job in (Job("x"), Job("x", prompt=5)):
        first = fake.start(job)
        assert fake.step(first) == [2]
        fake.finish(first)
    assert fake.processors.in_use == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: setattr(record, "prompt_token_ids", None), "its prompt holds embeddings"),
        (lambda record: setattr(record, "prompt_is_token_ids", [True, False, True]), "its prompt holds embeddings"),
    ],
)
def test_prompt_embeddings_end_the_request(change: Callable[[Record], None], reason: str) -> None:
    fake = VllmV1()
    record = fake.request(Job("x"))
    change(record)
    fake.add(record)
    assert fake.step(record) == [None]
    assert reason in fake.ends["x"]


@pytest.mark.parametrize(
    ("engine", "output", "reason"),
    [(VllmV1Async, [2, -1], "--logits-processors"), (VllmV1, [], "vLLM took back tokens of its output")],
    ids=["placeholder", "shortened"],
)
def test_output_that_is_not_known_ends_the_request(engine: type[VllmV1], output: list[int], reason: str) -> None:
    fake = engine()
    record = fake.start(Job("x"))
    assert fake.step(record) == [2]
    assert fake.step(record) == [3]
    record.output_token_ids[:] = output
    logits = torch.zeros(1, VOCAB_SIZE)
    with fake._logged():
        fake.seat.apply(logits)
    assert is_ended(logits[0])
    assert reason in fake.ends["x"]


def is_ended(row: torch.Tensor) -> bool:
    """Return True if only the fault token can be sampled."""
    return bool(row.isfinite().nonzero().tolist() == [[FAULT_TOKEN]])


@pytest.mark.parametrize(
    ("first", "allowed", "forbidden", "expected"),
    [
        (FAULT_TOKEN, None, 0, None),
        (4, [5, 6], 5, None),
        (4, None, 5, 4),
        (6, [5, 6], 5, 6),
    ],
    ids=["the_fault_token", "forbidden_by_a_hard_mask", "forbidden_otherwise", "allowed"],
)
def test_forced_token_obeys_hard_masks(
    first: int, allowed: list[int] | None, forbidden: int, expected: int | None
) -> None:
    """A mask of vLLM was applied before. Neither the model nor a processor may choose the fault token."""
    fake = VllmV1()
    record, other = fake.start(Job("x", first), Job("y", 20))
    record.sampling_params.allowed_token_ids = allowed
    fake.begin({record: 3, other: 3})
    logits = torch.zeros(2, VOCAB_SIZE)
    row = fake.rows.index(record)
    logits[row, :forbidden] = -torch.inf
    with fake._logged():
        fake.seat.apply(logits)
    assert logits[1 - row].argmax() == 20
    assert is_ended(logits[row]) == (expected is None)
    assert expected is None or logits[row].argmax() == expected
    assert ("left no token of those that allowed_token_ids" in fake.ends.get("x", "")) == (first == 4 and bool(allowed))


def test_request_without_an_allowed_token_ends_alone() -> None:
    """The client may allow only the fault token, and name no processor that could be blamed for it."""
    fake = VllmV1()
    blocked, other = fake.start(Job("x"), Job("y"))
    blocked.sampling_params.extra_args = {"logits_processors": "[]"}
    blocked.sampling_params.allowed_token_ids = [FAULT_TOKEN]
    assert fake.step(blocked, other) == [None, 2]


def test_untrackable_request_ends_and_others_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows after it and the moves of that step are applied."""
    request_of = BatchRequests.request_of

    def fail_for_one(requests: BatchRequests, output_token_ids: list[int]) -> Any:
        record = request_of(requests, output_token_ids)
        if record.req_id == "broken":
            raise LookupError("a bug")
        return record

    monkeypatch.setattr(BatchRequests, "request_of", fail_for_one)
    jobs = [Job("plain", None), Job("x", first=20), Job("y", first=30)]
    for seed in range(8):
        fake = (VllmV1, VllmV1Async)[seed % 2]()
        assert fake.run(seed, Job("broken"), *jobs) == {"broken": []} | {job.rid: job.expected for job in jobs}
        assert "(unknown) ends" in fake.ends["(unknown)"]
    assert "LookupError: a bug" in caplog.text


def test_rows_change_in_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain request has the row of one that ends with the plugin's error."""
    fake = VllmV1()
    failing = fake.start(Job("failing"))
    fake.step(failing)
    with monkeypatch.context() as patch:
        patch.setattr(fake.runtime, "begin_step", fail)
        assert fake.step(fake.start(Job("plain", None))) == [CHOICE]
    assert fake.step(failing) == [None]


def fail() -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("begins_early", [False, True])
def test_missing_discard_mask_ends_the_request(begins_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmV1, "begins_early", begins_early)
    executor = EarlyExecutor()
    fake = VllmV1(executor)
    fake.begin({fake.start(Job("x")): 3})
    del fake.discard_request_mask
    logits = torch.zeros(1, VOCAB_SIZE)
    fake.seat.apply(logits)
    assert is_ended(logits[0])
    assert executor.num_early == begins_early
    assert not executor.unfinished


def test_calls_begin_with_logits_if_the_plan_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = EarlyExecutor()
    fake = VllmV1(executor)
    x = fake.start(Job("x"))
    monkeypatch.setattr("logitship.server.vllm.batch_requests.SCHEDULED", "another_name")
    assert fake.step(x) == [2]
    assert executor.num_early == 0


def test_other_ranks_begin_no_calls() -> None:
    fake = VllmV1(group=FakeGroup.of(2)[1])
    fake.begin({fake.start(Job("x")): 3})
    assert fake.runtime._running == {}
