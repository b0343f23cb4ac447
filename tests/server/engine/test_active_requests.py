from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from logitship.sampler.processors.executor import DisabledExecutor, LoadedProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.active_requests import ActiveRequest, ActiveRequests
from logitship.server.engine.failures import STOPPED
from logitship.server.metrics.observed_metrics import ProcessorLabels, RequestMeter, RequestMetrics
from logitship.server.refusals import BadRequest, QueueFull, ServiceUnavailable
from logitship.server.requests.body_limits import QueuedBytes
from logitship.server.requests.messages import FinishReason, GenerationChunk, GenerationRequest, GenerationStream
from logitship.server.requests.sequence import Sequence
from logitship.server.tokenizer import Tokenizer

MakeSequence = Callable[[ActiveRequest, int], Sequence]
PROCESSOR = LoadedProcessor("sha256:1", "P", DisabledExecutor("none"), None)


class Released:
    """Counts the releases of processors."""

    def __init__(self) -> None:
        self.processors: list[LoadedProcessor] = []

    def __call__(self, processors: list[LoadedProcessor]) -> None:
        self.processors += processors


@pytest.fixture
def released() -> Released:
    return Released()


@pytest.fixture
def requests(released: Released) -> ActiveRequests:
    return ActiveRequests(max_running=2, max_queued=3, release=released)


@pytest.fixture
def make_sequence(tokenizer: Tokenizer, requests: ActiveRequests) -> MakeSequence:
    def make(active: ActiveRequest, index: int) -> Sequence:
        request = active.request
        return Sequence(
            rid=request.rid,
            index=index,
            names=frozenset({request.rid}),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            max_tokens=8,
            tokenizer=tokenizer,
            sink=requests.sink(active),
            tenant=request.tenant,
        )

    return make


def active(rid: str, n: int = 1, **fields: Any) -> ActiveRequest:
    request = GenerationRequest(rid=rid, prompt_token_ids=[5, 6], sampling_params=SamplingParams(), n=n, **fields)
    meter = RequestMeter(RequestMetrics(CollectorRegistry(), ProcessorLabels({})))
    return ActiveRequest(request, GenerationStream(n, lambda: None), meter, n, processors=[PROCESSOR])


async def chunks(request: ActiveRequest) -> list[GenerationChunk]:
    return [chunk async for chunk in request.stream]


async def test_request_ids_are_unique_by_tenant(requests: ActiveRequests) -> None:
    requests.reserve(active("r"))
    requests.reserve(active("r", tenant="other"))
    with pytest.raises(BadRequest, match="'r' is running already"):
        requests.reserve(active("r"))
    assert len(requests) == 2


async def test_queue_is_bounded(requests: ActiveRequests) -> None:
    requests.reserve(active("a", n=4))
    with pytest.raises(QueueFull, match="4 sequences run or wait, at most 5 may, and this request has 2: "):
        requests.reserve(active("b", n=2))
    requests.reserve(active("b"))
    with pytest.raises(QueueFull, match="5 sequences run or wait, at most 5 may: "):
        requests.reserve(active("c"))


async def test_no_tenant_gets_the_whole_queue(released: Released) -> None:
    requests = ActiveRequests(max_running=2, max_queued=4, release=released, max_per_tenant=5)
    requests.reserve(active("a", n=5, tenant="greedy"))
    with pytest.raises(QueueFull, match="5 of your sequences run or wait, and a client may have 5: "):
        requests.reserve(active("b", tenant="greedy"))
    requests.reserve(active("b", tenant="other"))
    with pytest.raises(QueueFull, match="the queue is full"):
        requests.reserve(active("c", tenant="third"))


async def test_processors_are_released_with_the_last_sequence(
    requests: ActiveRequests, released: Released, make_sequence: MakeSequence
) -> None:
    request = active("r", n=2)
    requests.reserve(request)
    first, second = (make_sequence(request, index) for index in range(2))
    requests.sequence_finished(first)
    assert (released.processors, len(requests)) == ([], 1)
    requests.sequence_finished(second)
    assert (released.processors, len(requests)) == ([PROCESSOR], 0)


async def test_chunks_are_delivered_after_the_step(requests: ActiveRequests, make_sequence: MakeSequence) -> None:
    request = active("r")
    requests.reserve(request)
    sequence = make_sequence(request, 0)
    sequence.append(70, None)
    sequence.finish(FinishReason("abort"))
    assert len(request.undelivered) == 2
    requests.deliver()
    assert request.undelivered == []
    assert [chunk.token_ids for chunk in await chunks(request)] == [[70], []]


async def test_cancel_by_request_and_batch_id(requests: ActiveRequests) -> None:
    one, batched, other = active("a"), active("b", batch_rid="batch"), active("a", tenant="other")
    for request in (one, batched, other):
        requests.reserve(request)
    requests.abort("batch", tenant="")
    assert [each.aborted for each in (one, batched, other)] == [set(), {"batch"}, set()]
    requests.abort(None, tenant="")
    assert [bool(each.aborted) for each in (one, batched, other)] == [True, True, False]


async def test_close_refuses_new_requests(requests: ActiveRequests) -> None:
    requests.reserve(active("a"))
    requests.close()
    assert not requests.accepting
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        requests.reserve(active("b"))
    assert len(requests) == 1


async def test_fail_all_ends_every_stream_and_refuses_new_requests(requests: ActiveRequests) -> None:
    request = active("a", n=2)
    requests.reserve(request)
    requests.fail_all()
    reasons = [chunk.finish_reason for chunk in await chunks(request)]
    assert [reason.error.status_code for reason in reasons if reason and reason.error] == [500, 500]
    with pytest.raises(ServiceUnavailable, match="died"):
        requests.check_accepting()
    requests.fail_all(STOPPED)
    await asyncio.sleep(0)
    assert request.stream._chunks.empty()


async def test_body_is_counted_until_the_request_starts(requests: ActiveRequests, make_sequence: MakeSequence) -> None:
    queued = QueuedBytes(100, 100)
    body = queued.open("")
    body.add(10)
    first, second = active("first"), active("second")
    for each in (first, second):
        each.body = body
        requests.reserve(each)
    body.release()  # the route's
    sequence = make_sequence(first, 0)
    requests.sequence_started(sequence)
    requests.sequence_finished(sequence)
    assert queued.total == 10
    requests.release(second)
    assert queued.total == 0


async def test_refused_request_does_not_hold_its_body(requests: ActiveRequests) -> None:
    queued = QueuedBytes(100, 100)
    body = queued.open("")
    body.add(10)
    requests.reserve(active("r"))
    again = active("r")
    again.body = body
    with pytest.raises(BadRequest):
        requests.reserve(again)
    body.release()
    assert queued.total == 0


async def test_one_tenant_cannot_fill_the_queue(released: Released) -> None:
    requests = ActiveRequests(max_running=2, max_queued=4, release=released, max_per_tenant=3)
    requests.reserve(active("r", 2, tenant="a"))
    with pytest.raises(
        QueueFull, match="2 of your sequences run or wait, and a client may have 3, and this request has 2: "
    ):
        requests.reserve(active("s", 2, tenant="a"))
    requests.reserve(active("s", 1, tenant="a"))
    requests.reserve(active("s", 3, tenant="b"))
