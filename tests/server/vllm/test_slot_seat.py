"""`SlotSeat` alone: slots, buffers, and rows of draft tokens of model runner V2."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.server.runtime.early_executor import EarlyExecutor
from tests.server.runtime.fake_engine import CHOICE, VOCAB_SIZE, FakeGroup, Job

from .fake_vllm import VllmV2, VllmV2Async, VllmV2Drafts
from .test_batch_seat import is_ended


def test_prompt_of_embeddings_ends_its_request() -> None:
    """Also after it was preempted. Another one beside it continues."""
    fake = VllmV2Async()
    other = fake.start(Job("other", 20))
    fake.holds_embeddings = True
    x = fake.start(Job("x"))
    assert fake.step(x, other) == [None, 20]
    fake._preempt(x)
    x.output[:] = [5]
    fake.add(x)
    assert fake.step(x, other) == [None, 21]


def test_calls_begin_with_logits_if_the_plan_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    executor = EarlyExecutor()
    fake = VllmV2(executor)
    fake.begins_early = False  # type: ignore[misc]
    x = fake.start(Job("x"))
    fake.begin({x: 3})
    fake.seat.begin((1 // length, length) for length in (1, 0))
    assert fake.sampled(x) == [2]
    assert executor.num_early == 0
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda buffers: buffers.total_len.gpu.fill_(1),
        lambda buffers: setattr(buffers, "all_token_ids", None),
    ],
    ids=["wrong_length", "unreadable"],
)
def test_wrong_buffers_end_the_request(change: Any) -> None:
    fake = VllmV2Async()
    x = fake.start(Job("x"))
    change(fake.buffers)
    fake.begin({x: 3})
    logits = torch.zeros(1, VOCAB_SIZE)
    fake._apply(logits, [x])
    assert is_ended(logits[0])
    assert fake.processors.in_use == 0


def test_unexpected_rows_end_their_requests() -> None:
    fake = VllmV2Async()
    x = fake.start(Job("x"))
    fake.begin({x: 3})
    ctx = SimpleNamespace(
        idx_mapping_np=np.array([x.slot]),
        expanded_idx_mapping=torch.tensor([x.slot] * 3),
        seq_lens_upper_bound_np=np.array([3]),
    )
    logits = torch.zeros(3, VOCAB_SIZE)
    fake.seat.apply(logits, ctx)
    assert all(is_ended(row) for row in logits)
    assert fake.processors.in_use == 0


@pytest.mark.parametrize(("known", "output"), [(0, [3]), (3, [2])], ids=["without_state", "with_fewer_tokens"])
def test_request_that_resumes_with_another_history_ends(known: int, output: list[int]) -> None:
    fake = VllmV2Async()
    x = fake.request(Job("x"))
    if known:
        fake.add(x)
        assert [fake.step(x) for _ in range(known)] == [[2], [3], [4]]
        fake._preempt(x)
    x.output[:] = output
    fake.add(x)
    assert fake.step(x) == [None]


def test_request_id_reused_in_the_same_step_is_a_new_request() -> None:
    fake = VllmV2Async()
    first = fake.start(Job("x"))
    assert fake.step(first) == [2]
    fake.finish(first)
    assert fake.step(fake.start(Job("x", 20, prompt=4))) == [20]
    assert fake.processors.in_use == 1


@pytest.mark.parametrize(("rank", "first"), [(0, None), (1, 2)], ids=["without_processors", "on_another_rank"])
def test_buffers_are_read_only_where_processors_run(rank: int, first: int | None) -> None:
    fake = VllmV2(group=FakeGroup(rank, 1, [], threading.Barrier(1)))
    x = fake.start(Job("x", first))
    fake.buffers.all_token_ids = fake.buffers.total_len = None
    fake.begin({x: 3})
    assert fake.sample(x) == {x: [CHOICE]}
    assert fake.processors.in_use == 0
    assert fake.runtime._running == {}


def test_other_tokens_than_drafted_end_the_request() -> None:
    fake = VllmV2Drafts()
    x = fake.start(Job("x", others=-2.0))
    assert fake.step(x) == [2]
    fake.begin({x: 1})
    fake.verify([x], [[2, 7]], torch.zeros(2, VOCAB_SIZE))
    fake._append({x: [8, 6]})
    x.take(2)
    fake.draft_tokens = ()
    assert fake.step(x) == [None]
    assert "behind which no processor was called" in fake.ends["x"]


@pytest.mark.parametrize("budget", [None, 1])
def test_draft_that_the_processors_forbid_is_followed_if_vllm_may_force_it(budget: int | None) -> None:
    """A thinking budget does, after the processors."""
    fake = VllmV2Drafts()
    request = fake.request(Job("x"))
    request.sampling_params.thinking_token_budget = budget
    fake.add(request)
    assert fake.step(request) == [2]
    fake.begin({request: 1})
    fake.verify([request], [[2, 40]], torch.zeros(2, VOCAB_SIZE))
    assert len(fake.runtime.behind_drafts) == (budget is not None)
