from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from logitship.server.sglang import hooks
from logitship.server.sglang.loading_requests import LoadingRequests
from logitship.server.sglang.sampling_ranks import SamplingRanks
from logitship.server.sglang.sglang_seat import find_scheduled
from tests.server.runtime.fake_engine import Job

from .fake_sglang import FakeReq, Sglang


class FakeSeat:
    """Loads processors when the test says so.

    Attributes:
        loaded: the reasons of requests whose processors are loaded, None: they run.
    """

    def __init__(self) -> None:
        self.loaded: dict[FakeReq, str | None] = {}

    def must_wait(self, req: FakeReq) -> bool:
        return req not in self.loaded

    def load(self, req: FakeReq) -> str | None:
        return self.loaded[req]


class FakeScheduler:
    """SGLang's `Scheduler`, as far as requests reach its waiting queue and are aborted there."""

    def __init__(self) -> None:
        self.waiting_queue: list[FakeReq] = []
        self.ended: list[tuple[FakeReq, Any]] = []

    def _add_request_to_queue(self, req: FakeReq, is_retracted: bool = False) -> None:
        hooks.wait_for_processors(FakeScheduler.add, self, req, is_retracted)

    def add(self, req: FakeReq, is_retracted: bool) -> None:
        self.waiting_queue.append(req)

    def step(self) -> list[FakeReq]:
        return hooks.add_loaded(FakeScheduler.next_batch, self, None, None)  # type: ignore[no-any-return]

    def next_batch(self, running_batch: Any, last_batch: Any) -> list[FakeReq]:
        batch, self.waiting_queue[:] = [*self.waiting_queue], []
        return batch

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        return hooks.is_idle(lambda scheduler, *flags: not scheduler.waiting_queue, self, for_health_check)

    def abort_request(self, recv_req: Any) -> None:
        hooks.abort_waiting(FakeScheduler.abort, self, recv_req)

    def abort(self, recv_req: Any) -> None:
        for index in reversed(range(len(self.waiting_queue))):
            if self.waiting_queue[index].rid == recv_req.rid:
                self.ended.append((self.waiting_queue.pop(index), "aborted"))

    def retire_unadmitted_request(self, req: FakeReq) -> None:
        self.ended.append((req, req.finished_reason.message))


def ranks(number: int = 0, size: int = 1, sent: list[Any] | None = None) -> SamplingRanks:
    def broadcast_object(value: Any, src: int) -> Any:
        assert sent is not None
        if number == src:
            sent.append(value)
        return sent[-1]

    return SamplingRanks(SimpleNamespace(rank_in_group=number, world_size=size, broadcast_object=broadcast_object))


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> FakeSeat:
    def prepare_abort(req: Any, message: str, status_code: Any) -> None:
        req.finished_reason = SimpleNamespace(message=message, status_code=status_code)

    module = ModuleType("sglang.srt.disaggregation.utils")
    module.prepare_abort = prepare_abort  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    seat = FakeSeat()
    monkeypatch.setattr(hooks, "_loading", LoadingRequests(seat, ranks()))
    return seat


def requests(*names: str) -> list[FakeReq]:
    fake = Sglang()
    return [fake.request(Job(name)) for name in names]


def test_request_waits_outside_of_the_batch_until_it_is_loaded(seat: FakeSeat) -> None:
    scheduler = FakeScheduler()
    slow, quick, plain = requests("slow", "quick", "plain")
    plain.custom_logit_processor = None
    for req in (slow, quick, plain):
        scheduler._add_request_to_queue(req)
    seat.loaded[quick] = None
    assert scheduler.step() == [plain, quick]
    assert scheduler.is_fully_idle(for_health_check=True)
    assert not scheduler.is_fully_idle()
    assert scheduler.step() == []
    seat.loaded[slow] = None
    assert scheduler.step() == [slow]
    assert scheduler.is_fully_idle()
    scheduler._add_request_to_queue(slow, is_retracted=True)
    scheduler._add_request_to_queue(quick)  # as SGLang does when it pauses
    assert scheduler.step() == [slow, quick]


def test_request_that_cannot_run_ends(seat: FakeSeat) -> None:
    scheduler = FakeScheduler()
    (req,) = requests("x")
    scheduler._add_request_to_queue(req)
    seat.loaded[req] = "ProcessorFault: no instance of this"
    assert scheduler.step() == []
    assert scheduler.ended == [(req, "ProcessorFault: no instance of this")]
    assert (req.finished_reason.status_code, req.finished_reason.err_type) == (400, "ProcessorFault")
    assert scheduler.is_fully_idle()


def test_waiting_request_is_aborted(seat: FakeSeat) -> None:
    scheduler = FakeScheduler()
    first, second = requests("first", "second")
    for req in (first, second):
        scheduler._add_request_to_queue(req)
    scheduler.abort_request(SimpleNamespace(rid=first.rid))
    assert scheduler.ended == [(first, "aborted")]
    assert scheduler.waiting_queue == []
    seat.loaded[second] = None
    assert scheduler.step() == [second]


def test_request_that_is_about_to_end_does_not_wait(seat: FakeSeat) -> None:
    scheduler = FakeScheduler()
    (req,) = requests("x")
    req.to_finish = object()
    scheduler._add_request_to_queue(req)
    assert scheduler.step() == [req]
    assert find_scheduled(req) is None


def test_first_rank_decides() -> None:
    sent: list[Any] = []
    seat, reqs = FakeSeat(), requests("a", "b", "c")
    queues = [LoadingRequests(seat, ranks(number, 2, sent)) for number in range(2)]
    for queue in queues:
        for req in reqs:
            queue.add(req)
    seat.loaded = {reqs[2]: None, reqs[0]: "a reason"}
    taken = [queue.take_ready() for queue in queues]
    assert taken == [[(reqs[0], "a reason"), (reqs[2], None)]] * 2
    assert [len(queue) for queue in queues] == [1, 1]
    assert len(sent) == 1


def test_loaded_request_runs_without_a_load_in_its_step() -> None:
    fake = Sglang()
    good, bad = fake.request(Job("good")), fake.request(Job("bad"))
    bad.custom_logit_processor = "unmarked"
    for req in (good, bad):
        while fake.seat.must_wait(req):
            pass
    assert fake.seat.load(good) is None
    assert "has not been checked" in str(fake.seat.load(bad))
    found = find_scheduled(good)
    assert found is not None
    assert found.params is not None
