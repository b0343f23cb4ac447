"""The queue of loads, with an executor whose loads end when the test says so."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import ExecutorUnavailable, LoadedProcessor
from logitship.sampler.processors.processor_cache import ProcessorCache, ProcessorCacheFull
from logitship.server.processors.load_queue import (
    FAILURE_TTL,
    LoadBudget,
    LoadQueue,
    LoadQueueFull,
    LoadStats,
    load_rate,
)
from logitship.server.refusals import RateLimited
from tests.helpers.clock import Clock
from tests.helpers.coroutines import run

from .paused_executor import LONG, PausedExecutor


class Scene:
    """A queue, and tasks that wait in it."""

    def __init__(
        self, *, cancels: bool = True, max_loads: int = 3, max_waiting: int = 64, rate: float = math.inf
    ) -> None:
        self.executor = PausedExecutor(cancels=cancels)
        self.cache = ProcessorCache(self.executor, max_entries=1000, max_bytes=1 << 20)
        self.clock = Clock()
        self.pauses: list[float] = []
        self.may_continue = threading.Event()
        self.queue = LoadQueue(
            self.cache,
            max_loads=max_loads,
            max_waiting=max_waiting,
            budget=LoadBudget(rate, burst=1.0, clock=self.clock),
            clock=self.clock,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        assert self.may_continue.wait(LONG)

    def acquire(self, name: str, tenant: str = "a") -> asyncio.Task[LoadedProcessor]:
        return asyncio.ensure_future(self.queue.acquire(string(name), tenant))

    async def load(self, name: str, tenant: str = "a") -> LoadedProcessor:
        """Load a processor at once."""
        self.executor.end(tenant, name)
        return await self.acquire(name, tenant)

    async def until_idle(self) -> None:
        """Wait until no load is running."""
        loads = [thread for thread in threading.enumerate() if thread.name == "logitship-load"]
        await asyncio.to_thread(lambda: [thread.join(LONG) for thread in loads])


@asynccontextmanager
async def no_leftovers(scene: Scene) -> AsyncIterator[None]:
    """Check that nothing is loading, waiting or acquired in the end."""
    yield
    await scene.until_idle()
    assert scene.queue.stats() == LoadStats(0, 0)
    scene.cache.clear()
    assert scene.cache.stats().entries == 0, "one is still acquired"


def string(name: str) -> SourceProcessor:
    return SourceProcessor("#", name)


def _until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


async def turns() -> None:
    """Let the other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_few_loads_at_a_time_in_turn_for_each_tenant() -> None:
    scene = Scene()
    executor = scene.executor
    async with no_leftovers(scene):
        tasks = [scene.acquire(f"A{number}", "a") for number in range(6)]
        # The third thread is for another tenant.
        await executor.until_began(("a", "A0"), ("a", "A1"))
        assert scene.queue.stats() == LoadStats(running=2, waiting=4)
        tasks += [scene.acquire(f"B{number}", "b") for number in range(2)]
        await executor.until_began(("a", "A0"), ("a", "A1"), ("b", "B0"))
        executor.end("a", "A0")
        await executor.until_began(("a", "A0"), ("a", "A1"), ("b", "B0"), ("a", "A2"))
        executor.end("a", "A1")
        await executor.until_began(("a", "A0"), ("a", "A1"), ("b", "B0"), ("a", "A2"), ("b", "B1"))
        for number in range(6):
            executor.end("a", f"A{number}")
            executor.end("b", f"B{number}")
        for task in tasks:
            scene.cache.release(await task)
        assert executor.most == 3


async def test_same_processor_is_loaded_once() -> None:
    scene = Scene()
    async with no_leftovers(scene):
        threads = threading.active_count()
        tasks = [scene.acquire("A") for _ in range(1000)]
        await scene.executor.until_began(("a", "A"))
        assert threading.active_count() <= threads + 2  # the load, and the test's own `to_thread`
        scene.executor.end("a", "A")
        processors = [await task for task in tasks]
        assert len(set(processors)) == 1
        assert scene.executor.began == [("a", "A")]
        for processor in processors[1:]:
            scene.cache.release(processor)
        scene.cache.clear()
        assert scene.cache.stats().entries == 1, "one user is left"
        scene.cache.release(processors[0])


async def test_tenant_whose_loads_took_long_waits_alone() -> None:
    scene = Scene(max_loads=2, rate=0.5)  # a tenant has one thread
    executor, clock = scene.executor, scene.clock
    async with no_leftovers(scene):
        loaded = []
        for number, pauses in enumerate(([], [1.0])):  # one second at once; then half of one is left
            task = scene.acquire(f"A{number}")
            await executor.until_began(*(("a", f"A{each}") for each in range(number + 1)))
            clock.now += 1
            executor.end("a", f"A{number}")
            loaded.append(await task)
            if pauses:
                await asyncio.to_thread(_until, lambda: bool(scene.pauses))
            assert scene.pauses == pauses
        waiting = scene.acquire("A2")
        loaded.append(await scene.load("B", "b"))
        assert ("a", "A2") not in executor.began
        scene.may_continue.set()
        executor.end("a", "A2")
        for processor in (*loaded, await waiting):
            scene.cache.release(processor)


def test_budget_is_refilled_and_counts_no_load_for_more_than_the_burst() -> None:
    clock = Clock()
    budget = LoadBudget(0.5, burst=2.0, clock=clock)
    assert budget.use("a", 30.0) == 0.0
    assert budget.use("a", 1.0) == 2.0
    assert budget.use("b", 1.0) == 0.0
    clock.now += 4
    assert budget.use("a", 1.0) == 0.0
    assert budget.use("a", 1.0) == 2.0
    assert LoadBudget(math.inf).use("a", 1e9) == 0.0


def test_loads_may_use_the_cores_that_the_engine_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [load_rate(threads) for threads in (1, 14, 16, 32)] == [15, 2, 2, 2]


async def test_loaded_processor_does_not_wait_for_loads() -> None:
    scene = Scene(max_loads=1)
    async with no_leftovers(scene):
        loaded = await scene.load("ready")
        hanging = scene.acquire("hangs")
        await scene.executor.until_began(("a", "ready"), ("a", "hangs"))
        before = set(threading.enumerate())
        assert await scene.queue.acquire(string("ready"), "a") is loaded
        assert set(threading.enumerate()) <= before
        scene.executor.end("a", "hangs")
        for processor in (loaded, loaded, await hanging):
            scene.cache.release(processor)


async def test_processor_that_must_be_reloaded_is_queued() -> None:
    scene = Scene()
    async with no_leftovers(scene):
        loaded = await scene.load("A")
        scene.executor.ready = False
        assert await scene.acquire("A") is loaded
        assert scene.executor.began == [("a", "A"), ("ensured", "A")]
        scene.cache.release(loaded)
        scene.cache.release(loaded)


async def test_load_without_waiters_is_cancelled() -> None:
    scene = Scene(max_loads=1)
    async with no_leftovers(scene):
        leaving = [scene.acquire("A") for _ in range(2)]
        waiting = [scene.acquire("B"), scene.acquire("C")]
        await scene.executor.until_began(("a", "A"))
        waiting[0].cancel()
        leaving[0].cancel()
        await turns()
        assert scene.executor.cancelled == [], "one still waits for A"
        assert scene.queue.stats() == LoadStats(running=1, waiting=1)
        leaving[1].cancel()
        await turns()
        assert scene.executor.cancelled == [("a", "A")]
        await scene.executor.until_began(("a", "A"), ("a", "C"))
        scene.executor.end("a", "C")
        scene.cache.release(await waiting[1])
        # Nobody heard that it could not be loaded.
        scene.cache.release(await scene.load("A"))


async def test_load_that_cannot_be_cancelled_blocks_no_other() -> None:
    scene = Scene(cancels=False, max_loads=1)
    async with no_leftovers(scene):
        hanging = scene.acquire("hangs")
        await scene.executor.until_began(("a", "hangs"))
        hanging.cancel()
        scene.cache.release(await scene.load("A"))
        scene.executor.end("a", "hangs")


async def test_thread_that_cannot_be_started_fails_its_load_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        if thread.name == "logitship-load":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    scene = Scene(max_loads=1)
    async with no_leftovers(scene):
        first, behind = scene.acquire("A"), scene.acquire("B")
        await scene.executor.until_began(("a", "A"))
        monkeypatch.setattr(threading.Thread, "start", fail)
        scene.executor.end("a", "A")
        scene.cache.release(await first)
        for task in (behind, scene.acquire("B"), scene.acquire("C")):
            with pytest.raises(ExecutorUnavailable, match="no thread can be started to load it: try again later"):
                await task
        monkeypatch.undo()
        for name in "BC":
            scene.cache.release(await scene.load(name))


async def test_processor_that_arrives_while_its_waiter_leaves_is_released() -> None:
    scene = Scene()
    async with no_leftovers(scene):
        resolve = scene.queue._resolve

        def resolve_and_cancel(*args: Any) -> None:
            resolve(*args)
            task.cancel()  # before it runs again

        scene.queue._resolve = resolve_and_cancel  # type: ignore[method-assign]
        task = scene.acquire("A")
        scene.executor.end("a", "A")
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_waiting_loads_of_a_tenant_are_bounded() -> None:
    scene = Scene(max_loads=1, max_waiting=2)
    async with no_leftovers(scene):
        tasks = [scene.acquire(name) for name in "ABC"]
        await scene.executor.until_began(("a", "A"))
        with pytest.raises(LoadQueueFull, match="2 processors of this API key wait"):
            await scene.acquire("D")
        tasks += [scene.acquire("C"), scene.acquire("D", "b")]  # C waits already, and b is another tenant
        for name in "ABC":
            scene.executor.end("a", name)
        scene.executor.end("b", "D")
        for task in tasks:
            scene.cache.release(await task)


async def test_failure_is_remembered_for_a_while() -> None:
    scene = Scene()
    async with no_leftovers(scene):
        tasks = [scene.acquire("A") for _ in range(3)]
        await scene.executor.until_began(("a", "A"))
        scene.executor.end("a", "A", ProcessorLoadError("no such name"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["no such name"] * 3
        assert len(set(map(id, errors))) == 3
        with pytest.raises(
            ProcessorLoadError, match=r"no such name \(from an earlier attempt; the next one is possible in 10 s\)"
        ):
            await scene.acquire("A")
        assert scene.executor.began == [("a", "A")]
        scene.cache.release(await scene.load("A", "another tenant"))
        scene.clock.now += FAILURE_TTL
        scene.cache.release(await scene.load("A"))


@pytest.mark.parametrize("error", [ExecutorUnavailable("no zygote"), ProcessorCacheFull("full"), RuntimeError("bug")])
async def test_failure_of_the_server_is_not_remembered(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    async with no_leftovers(scene):
        scene.executor.end("a", "A", error)
        with pytest.raises(type(error), match=str(error)):
            await scene.acquire("A")
        scene.cache.release(await scene.load("A"))
    assert ("a processor cannot be loaded" in caplog.text) == isinstance(error, RuntimeError)


def test_closed_event_loop_releases_the_processor() -> None:
    scene = Scene()

    async def leave() -> None:
        asyncio.ensure_future(scene.queue.acquire(string("A"), "a"))  # noqa: RUF006  # cancelled with the loop
        await scene.executor.until_began(("a", "A"))
        scene.queue.leave = lambda waiter: None  # type: ignore[method-assign]

    asyncio.run(leave())
    scene.executor.end("a", "A")

    async def later() -> None:
        async with no_leftovers(scene):
            pass

    run(later())


def test_error_keeps_no_frame_alive() -> None:
    """A frame of a failed load holds its sandbox: shared memory and descriptors."""

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)

    def fail(it: Held) -> BaseException:
        try:
            raise ProcessorLoadError("no such name")
        except ProcessorLoadError as error:
            return error

    error = fail(held)
    assert error.__traceback__ is not None
    del held

    async def test() -> None:
        scene = Scene()
        async with no_leftovers(scene):
            nonlocal error
            scene.executor.end("a", "A", error)
            del error
            with pytest.raises(ProcessorLoadError):
                await scene.acquire("A")

    gc.disable()
    try:
        run(test())
        assert alive() is None
    finally:
        gc.enable()


async def test_refusal_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Each of those who wait gets its own, whole: the status and the headers of the response come from it."""
    scene = Scene()
    async with no_leftovers(scene):
        waiting = [scene.acquire("A") for _ in range(3)]
        await scene.executor.until_began(("a", "A"))
        scene.executor.end("a", "A", RateLimited("too often", what="processor_loads", retry_after=7))
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert len({id(each) for each in errors}) == 3
        for error in errors:
            assert isinstance(error, RateLimited)
            refusal = (str(error), error.message, error.what, error.retry_after)
            assert refusal == ("too often", "too often", "processor_loads", 7)
    assert not caplog.records
