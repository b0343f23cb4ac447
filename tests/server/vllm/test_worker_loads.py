"""Processors that load in the workers: the questions of a front end, and the answers of a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from logitship.sampler.processors.executor import ExecutorUnavailable
from logitship.server.runtime.allowances import Allowances
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship.server.vllm import worker_loads
from logitship.server.vllm.request_tenant import write_tenant
from logitship.server.vllm.worker_loads import WorkerLoads
from tests.helpers.clock import Clock
from tests.server.processors.paused_executor import PausedExecutor
from tests.server.runtime.fake_engine import FakeGroup
from tests.server.vllm.conftest import MakeParams
from tests.server.vllm.fake_vllm import VllmV1


class FakeLLM:
    """Fake of `AsyncLLM` whose workers have loaded everything, and which counts their calls."""

    num_calls = 0
    answers = True
    errored = False
    dead_error = RuntimeError("the engine is dead")

    @property
    def engine_core(self) -> FakeLLM:
        return self

    async def call_utility_all_async(self, *args: Any) -> list[list[bool]]:
        self.num_calls += 1
        if not self.answers:
            await asyncio.Event().wait()
        return [[False]]


async def test_workers_are_asked_about_a_class_ten_times_a_second() -> None:
    llm, clock = FakeLLM(), Clock()
    loads = WorkerLoads(clock)

    async def num_calls(*names: str) -> int:
        before = llm.num_calls
        await loads.wait(llm, {}, names)
        return llm.num_calls - before

    assert await num_calls() == 0
    assert await num_calls("a/x") == 1
    assert await num_calls("a/x") == 0
    assert await num_calls("b/x") == 1  # another tenant's is another
    assert await num_calls("a/x", "a/y") == 1
    clock.now += 0.11
    assert await num_calls("a/x") == 1
    assert len(loads._ready_until) == 1  # the others are dropped


async def test_request_ends_if_the_engine_dies_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loads, "_PATIENCE", 0.01)
    llm = FakeLLM()
    llm.answers = False
    waiting = asyncio.create_task(WorkerLoads().wait(llm, {}, ["a/x"]))
    while llm.num_calls == 0:
        await asyncio.sleep(0.001)
    llm.errored = True
    with pytest.raises(RuntimeError, match="the engine is dead"):
        await waiting


async def test_worker_loads_a_class_for_its_tenant_in_the_background(vllm_params: MakeParams) -> None:
    executor = PausedExecutor()
    engine = VllmV1(executor)
    params = vllm_params({"custom_logit_processor": '{"source": "#", "class_name": "A"}'})
    write_tenant(params, "a")
    assert engine.seat.must_wait(params.extra_args, [])
    await executor.until_began(("a", "A"))
    (name,) = engine.processors._begun
    assert engine.seat.must_wait(None, [name])
    executor.end("a", "A")
    while engine.seat.must_wait(None, [name]):
        await asyncio.sleep(0.001)
    assert not engine.seat.must_wait(params.extra_args, [])


async def test_no_step_loads_a_class_once_requests_wait_outside(vllm_params: MakeParams) -> None:
    """The first of two requests whose class fails to load has the error that it waited for, the other is refused."""
    executor = PausedExecutor()
    runtime = VllmV1(executor).seat._runtime
    params = vllm_params({"custom_logit_processor": '{"source": "#", "class_name": "A"}'})
    first, second = (TrackedRequest(params, rid, []) for rid in "xy")
    assert runtime.must_wait(first)
    assert runtime.must_wait(second)
    executor.end("", "A", ExecutorUnavailable("no process can be started"))
    while runtime.must_wait(first):
        await asyncio.sleep(0.001)
    runtime.load(first)
    runtime.load(second)
    assert "no process can be started" in str(first.fault)
    assert "its class is not loaded" in str(second.fault)
    executor.end("", "A")  # the second attempt, which `load` has begun


def test_worker_does_not_wait_for_what_its_step_will_refuse() -> None:
    engine = VllmV1()
    assert not engine.seat.must_wait({"custom_logit_processor": "{"}, [])
    assert not engine.seat.must_wait({"custom_logit_processor": 5}, [])


def test_request_with_a_class_that_was_too_slow_waits(
    processor_string: str, vllm_params: MakeParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Allowances, "is_paused", lambda self, name: asked.append(name) or len(asked) < 3)
    engine = VllmV1()
    params = vllm_params({"custom_logit_processor": processor_string})
    write_tenant(params, "a")
    while engine.seat.must_wait(params.extra_args, []):
        pass
    (name,) = {*asked}
    assert name.startswith("a/sha256:")


def test_other_ranks_load_nothing(processor_string: str) -> None:
    engine = VllmV1(group=FakeGroup.of(2)[1])
    assert not engine.seat.must_wait({"custom_logit_processor": processor_string}, [])
