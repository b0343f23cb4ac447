from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from logitship.server.refusals import QueueFull, ThreadUnavailable
from logitship.server.requests import fair_pool
from logitship.server.requests.fair_pool import REST, FairPool, in_daemon_thread
from tests.helpers.coroutines import run

GENEROUS = 30.0


class Blocker:
    """Jobs that run until `open`."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.gate = threading.Event()

    def __call__(self) -> str:
        self.started.release()
        assert self.gate.wait(GENEROUS)
        return "done"

    async def wait_until_running(self, jobs: int) -> None:
        for _ in range(jobs):
            assert await asyncio.to_thread(self.started.acquire, timeout=GENEROUS)


@pytest.fixture
def blocker() -> Iterator[Blocker]:
    made = Blocker()
    yield made
    made.gate.set()


@pytest.fixture
def pool() -> FairPool:
    return FairPool(3, 10, "test-pool")


def start(pool: FairPool, tenant: str, function: Callable[[], Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.run(tenant, function))


async def test_returns_and_raises_what_the_function_does(pool: FairPool) -> None:
    assert await pool.run("a", int, "11", base=2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run("a", int, "x")


async def test_first_job_of_another_tenant_starts_at_once(pool: FairPool, blocker: Blocker) -> None:
    theirs = [start(pool, "a", blocker) for _ in range(10)]
    await blocker.wait_until_running(2)
    assert await pool.run("b", threading.get_ident)
    while pool.num_running > 2:  # a result arrives before its thread has counted it
        await asyncio.sleep(0.001)
    assert pool.num_waiting == 8
    blocker.gate.set()
    assert await asyncio.gather(*theirs) == ["done"] * 10
    while pool.num_running:
        await asyncio.sleep(0.001)
    assert pool.num_waiting == 0


async def test_waiting_jobs_are_taken_in_turns(pool: FairPool, blocker: Blocker) -> None:
    """Three tenants occupy the threads; of what waits, each gets its first job before any gets its second."""
    ran: list[str] = []
    running = [start(pool, tenant, blocker) for tenant in "xyz"]
    await blocker.wait_until_running(3)
    waiting = [start(pool, tenant, lambda tenant=tenant: ran.append(tenant)) for tenant in "aaaabbcc"]
    await asyncio.sleep(0)
    blocker.gate.set()
    await asyncio.gather(*running, *waiting)
    assert sorted(ran[:3]) == ["a", "b", "c"]
    assert sorted(ran[3:6]) == ["a", "b", "c"]


async def test_cancelled_caller_frees_its_place_at_once(blocker: Blocker) -> None:
    pool = FairPool(2, 1, "test-pool")
    ran: list[str] = []
    running = start(pool, "a", blocker)
    await blocker.wait_until_running(1)
    waiting = start(pool, "a", lambda: ran.append("cancelled"))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="1 of your requests wait"):
        await pool.run("a", int)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool.num_waiting == 0
    next_one = start(pool, "a", lambda: ran.append("next"))
    blocker.gate.set()
    await asyncio.gather(running, next_one)
    assert ran == ["next"]


async def test_caller_may_be_cancelled_while_its_job_runs(pool: FairPool, blocker: Blocker) -> None:
    running = start(pool, "a", blocker)
    await blocker.wait_until_running(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    blocker.gate.set()
    assert await pool.run("a", int) == 0


def test_threads_are_reused_and_bounded(pool: FairPool) -> None:
    async def scenario() -> set[int]:
        jobs = [pool.run(str(i % 5), lambda: (time.sleep(0.001), threading.get_ident())[1]) for i in range(50)]
        return set(await asyncio.gather(*jobs))

    assert 1 <= len(asyncio.run(scenario())) <= 3
    assert 1 <= len(asyncio.run(scenario())) <= 3  # also from another event loop
    assert len(pool._threads) <= 3


def test_running_jobs_do_not_delay_the_end_of_the_process() -> None:
    program = (
        "import asyncio, time\n"
        "from logitship.server.requests.fair_pool import FairPool\n"
        "async def main():\n"
        "    task = asyncio.create_task(FairPool(2, 9, 'p').run('a', time.sleep, 3600))\n"
        "    await asyncio.sleep(0.1)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


class Body:
    """Something large."""


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_job_holds_is_freed_without_the_garbage_collector(pool: FairPool, fails: bool) -> None:
    def work(body: Body) -> None:
        if fails:
            raise ValueError("refused")

    async def scenario() -> None:
        body = Body()
        freed = weakref.ref(body)
        with contextlib.suppress(ValueError):
            await pool.run("a", work, body)
        del body
        await asyncio.sleep(0)  # the event loop refers to the future, and so to the exception, until it calls the next
        while pool.num_running:
            await asyncio.sleep(0.001)
        assert freed() is None

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


async def test_threads_rest_after_long_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    rested = threading.Event()

    class Time:
        thread_time = staticmethod(time.thread_time)

        @staticmethod
        def sleep(seconds: float) -> None:
            rests.append(seconds)
            rested.set()

    monkeypatch.setattr(fair_pool, "time", Time)
    pool = FairPool(2, 10, "test-pool")

    def spin(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    await pool.run("a", spin, 0.0)
    await pool.run("a", spin, 0.05)
    assert await asyncio.to_thread(rested.wait, GENEROUS)
    assert len(rests) == 1
    assert rests[0] >= REST * 0.05


async def test_results_come_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    resumes = threading.Event()

    class Time:
        thread_time = staticmethod(iter([0.0, 1.0, 1.0, 1.0]).__next__)

        @staticmethod
        def sleep(seconds: float) -> None:
            assert seconds == REST
            assert resumes.wait(GENEROUS)

    monkeypatch.setattr(fair_pool, "time", Time)
    pool = FairPool(2, 10, "test-pool")
    assert await pool.run("a", int, "3") == 3
    waiting = start(pool, "a", lambda: 4)
    await asyncio.sleep(0)
    assert (pool.num_running, pool.num_waiting) == (1, 1)  # a tenant whose thread rests does not get another
    resumes.set()
    assert await waiting == 4


async def test_jobs_run_at_a_low_priority(pool: FairPool) -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = nice()
    assert await pool.run("a", nice) == max(own, fair_pool._NICE)
    assert nice() == own


async def test_idle_threads_end_and_start_again() -> None:
    pool = FairPool(3, 10, "idle-pool", idle=0.001)

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("idle-pool")]

    first = await pool.run("a", threading.current_thread)
    await asyncio.to_thread(first.join, GENEROUS)
    assert not threads()
    assert await asyncio.gather(*(start(pool, "a", lambda: "again") for _ in range(5))) == ["again"] * 5
    for thread in threads():
        await asyncio.to_thread(thread.join, GENEROUS)
    assert not threads()


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread be started in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _fail_to_start)
        yield


def _fail_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_thread_that_cannot_start_is_not_counted(pool: FairPool) -> None:
    with no_more_threads():
        for _ in range(4):
            with pytest.raises(ThreadUnavailable, match=r"cannot start a thread .* try again later"):
                await pool.run("a", int)
    assert pool.num_waiting == 0
    assert await asyncio.gather(*(start(pool, tenant, int) for tenant in "aabbcc")) == [0] * 6


async def test_jobs_wait_for_the_threads_that_run(pool: FairPool, blocker: Blocker) -> None:
    first = start(pool, "a", blocker)
    await blocker.wait_until_running(1)
    with no_more_threads():
        others = [start(pool, tenant, int) for tenant in "abc"]
        while pool.num_waiting < 3:
            await asyncio.sleep(0.001)
        assert not any(each.done() for each in others)
        blocker.gate.set()
        assert await asyncio.gather(first, *others) == ["done", 0, 0, 0]


async def test_result_and_error_of_a_daemon_thread() -> None:
    assert await in_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(divmod, 7, 0)


async def test_hanging_calls_block_nothing() -> None:
    """There are more of them than threads in the shared pool; other calls and the end of the program do not wait."""
    never = threading.Event()
    hanging = [in_daemon_thread(never.wait) for _ in range(64)]
    result = await asyncio.to_thread(lambda: 42)
    assert not any(future.done() for future in hanging)
    assert result == 42
    threads = [thread for thread in threading.enumerate() if thread.name == "logitship-load"]
    assert all(thread.daemon for thread in threads)
    never.set()
    for thread in threads:
        thread.join()


async def test_cancelled_future_of_a_daemon_thread() -> None:
    done = threading.Event()
    future = in_daemon_thread(done.wait)
    future.cancel()
    done.set()
    await asyncio.to_thread(lambda: [t.join() for t in threading.enumerate() if t.name == "logitship-load"])
    assert future.cancelled()
