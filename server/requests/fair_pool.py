"""Threads for the CPU work of requests, shared fairly between tenants."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from logitship.sampler.cgroup_limits import num_cores
from logitship.sampler.round_robin_queue import RoundRobinQueue, TenantQueueFull
from logitship.sampler.sandbox.cpu_time import lower_priority
from logitship.server.refusals import QueueFull, ThreadUnavailable

P = ParamSpec("P")
T = TypeVar("T")

REST = 2.0
"""Rest after long work, as a multiple of its CPU time."""

_LONG_JOB = 0.005
"""Seconds of CPU time of a job from which on its thread rests afterwards."""

_NICE = 7
"""Nice value of threads for such work: beside a busy core, they get a fifth of it."""

SCRAPES = "/metrics"
"""Tenant of scrapes of the metrics. Its jobs do not count as running: a scrape would always see its own."""

_IDLE = 2.0
"""Seconds without a job after which a thread ends."""


def pool_threads() -> int:
    """Return the number of threads for a server: half the cores, because the engine computes on all; at least 2."""
    return max(2, num_cores() // 2)


class FairPool:
    """A bounded pool of daemon threads. Waiting jobs are taken round robin between tenants.

    Guarantees:
    * A tenant occupies all threads but one at most, so that the first job of another tenant starts at once.
    * Jobs leave the cores to the engine, see `run_behind_the_engine`. A thread rests after a long job for longer than
      that took, and counts as its tenant's meanwhile: each operation of a forward pass waits for the GIL.
    * A job that waits ends when its caller is cancelled. A job that runs is not interrupted: keep jobs short.
    * Threads start with the first jobs, and end when they have had none for a while. They do not delay the end of the
      process. Where one cannot be started, jobs wait for the others; a job is refused if there are none.

    Args:
        num_threads: most threads, 2 or more.
        max_waiting: most waiting jobs of a tenant.
        name: prefix of the threads' names.
        idle: seconds without a job after which a thread ends.
    """

    def __init__(self, num_threads: int, max_waiting: int, name: str, idle: float = _IDLE) -> None:
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._names = (f"{name}-{number}" for number in itertools.count())
        self._idle = idle
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._waiting: RoundRobinQueue[Callable[[], None]] = RoundRobinQueue(max_waiting)
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a thread."""
        with self._changed:
            return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs that run, without scrapes."""
        with self._changed:
            return self._running.total() - self._running[SCRAPES]

    async def run(self, tenant: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on a thread of the pool, and return its result.

        Args:
            tenant: whose job it is.
            function: must not block on anything but the CPU.
            *args: its arguments.
            **kwargs: its keyword arguments.

        Raises:
            QueueFull: too many jobs of the tenant wait.
            ThreadUnavailable: the pool has no thread, and none can be started.
            Exception: what the function raises.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = partial(call_for, future, partial(function, *args, **kwargs))
        self._put(tenant, job)
        try:
            return await future
        except asyncio.CancelledError:
            with self._changed:
                self._waiting.remove(tenant, job)
            raise
        finally:
            # An exception refers to this call through its traceback. Without a cycle, what it holds is freed soon.
            del future, job

    def _put(self, tenant: str, job: Callable[[], None]) -> None:
        with self._changed:
            try:
                self._waiting.put(tenant, job)
            except TenantQueueFull:
                raise QueueFull(
                    f"{self._max_waiting} of your requests wait to be prepared already: try again later"
                ) from None
            if len(self._waiting) > self._num_idle and len(self._threads) < self._num_threads:
                try:
                    self._start_thread()
                except ThreadUnavailable:
                    if not self._threads:
                        self._waiting.remove(tenant, job)
                        raise
            self._changed.notify()

    def _start_thread(self) -> None:
        thread = start_thread(self._work, next(self._names))
        self._threads.add(thread)

    def _work(self) -> None:
        run_behind_the_engine()
        while (taken := self._next()) is not None:
            tenant, job = taken
            began = time.thread_time()
            job()
            del job, taken  # it may hold a large body
            if (seconds := time.thread_time() - began) > _LONG_JOB:
                time.sleep(REST * seconds)
            with self._changed:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._changed.notify_all()  # the tenant may have been passed over

    def _next(self) -> tuple[str, Callable[[], None]] | None:
        """Wait for a job, and count it as running. Returns None if the thread has to end."""
        with self._changed:
            is_called = True
            while (taken := self._waiting.get(self._may_take)) is None and is_called:
                self._num_idle += 1
                is_called = self._changed.wait(self._idle)
                self._num_idle -= 1
            if taken is None:
                self._threads.discard(threading.current_thread())
            else:
                self._running[taken[0]] += 1
            return taken

    def _may_take(self, tenant: str) -> bool:
        return self._running[tenant] < self._num_threads - 1


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread for a request.

    Raises:
        ThreadUnavailable: the system has no thread left.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise ThreadUnavailable from None
    return thread


def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call `function` in a daemon thread of its own, in a copy of the caller's context.

    Loading a processor runs its author's code, which may take long or never return, and parameters may take long to
    check. `asyncio.to_thread` would occupy a thread of the shared pool with it, and Python would wait for that thread
    at exit.

    Raises:
        ThreadUnavailable: no thread can be started.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    call = partial(call_for, future, partial(function, *args, **kwargs))
    context = contextvars.copy_context()
    start_thread(partial(context.run, call), "logitship-load")
    return future


def run_behind_the_engine() -> None:
    """Give the calling thread a low priority, until it ends.

    A forward pass uses all cores: each of its parallel regions ends with its slowest thread, so that a step takes twice
    as long if one of them shares its core. While the engine waits for the GIL, its own core is free for this thread.
    """
    lower_priority(threading.get_native_id(), _NICE)


def call_for(future: asyncio.Future[T], function: Callable[[], T]) -> None:
    """Call a function in this thread, and let a future of an event loop in another have its result or exception."""
    result, error = None, None
    try:
        result = function()
    except BaseException as raised:  # noqa: BLE001  # boundary: event loop
        error = raised
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        future.get_loop().call_soon_threadsafe(_settle, future, result, error)
    del future, result, error  # no cycle with the traceback


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
