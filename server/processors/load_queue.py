"""The queue of shipped processors that are to be loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.cgroup_limits import num_cores
from logitship.sampler.processors.executor import ExecutorUnavailable, LoadedProcessor, failed_before
from logitship.sampler.processors.processor_cache import Key, ProcessorCache, ProcessorCacheFull
from logitship.sampler.round_robin_queue import RoundRobinQueue, TenantQueueFull
from logitship.server.refusals import RequestRefused

logger = logging.getLogger(__name__)

MAX_LOADS = 3
"""Loads at a time in sandboxes: author code that competes with the engine for the cores."""

MAX_WAITING = 64
"""Loads of one tenant that may wait."""

BURST = 1.0
"""Seconds of loads that a tenant may use at once. A class takes a few hundredths."""

FAILURE_TTL = 10.0
"""Seconds in which a processor that could not be loaded is refused without another attempt."""

_SHARE = 1 / 8
"""Share of the cores that the loads of a tenant may use if the engine's threads use all."""
_MAX_FAILURES = 1024
_EXPECTED = (ProcessorLoadError, ProcessorCacheFull, ExecutorUnavailable, RequestRefused)
Outcome: TypeAlias = LoadedProcessor | BaseException
"""A processor, which is to be released, or the error of its load."""
Runnable: TypeAlias = PickledProcessor | SourceProcessor


class LoadQueueFull(Exception):
    """Too many processors of a tenant wait to be loaded. Try again later."""


@dataclass(frozen=True)
class LoadStats:
    """Numbers of loads.

    Attributes:
        running: loads in progress.
        waiting: loads that wait.
    """

    running: int
    waiting: int


@dataclass(eq=False)
class _Load:
    """A processor to load, and those who wait for it.

    Attributes:
        runs: a thread loads it.
        abandoned: it ran when the last waiter left.
    """

    key: Key
    string: Runnable
    waiters: list[LoadWaiter] = field(default_factory=list)
    runs: bool = False
    abandoned: bool = False


@dataclass(frozen=True, eq=False)
class LoadWaiter:
    """Somebody who waits for a load.

    Attributes:
        load: the load.
        deliver: called once with its outcome, in any thread, unless the waiter leaves before.
    """

    load: _Load
    deliver: Callable[[Outcome], None]


class LoadBudget:
    """The time that the loads of each tenant may use, so that new classes leave the engine most of its cores.

    A low priority alone does not: the threads of a forward pass wait for each other, and each waits for the end of a
    time slice of whatever runs on its core.

    Args:
        rate: seconds of loads per second; math.inf for no limit.
        burst: seconds that a tenant saves up.
        clock: returns seconds.
    """

    def __init__(self, rate: float, burst: float = BURST, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}
        """Tenant → (seconds used, at this time)."""

    def use(self, tenant: str, seconds: float) -> float:
        """Subtract the time of a load. Return the seconds until the tenant's next one may begin.

        Of a load that took longer than the burst, which probably waited for something, only so much counts.
        """
        if self._rate == math.inf:
            return 0.0
        now = self._clock()
        self._used = {name: each for name, each in self._used.items() if self._remaining(each, now) > 0}
        used = self._remaining(self._used.get(tenant, (0.0, now)), now) + min(seconds, self._burst)
        self._used[tenant] = used, now
        return max(0.0, used - self._burst) / self._rate

    def _remaining(self, used: tuple[float, float], now: float) -> float:
        seconds, at = used
        return max(0.0, seconds - (now - at) * self._rate)


def load_rate(num_threads: int) -> float:
    """Return the seconds of loads per second of one tenant: the cores that the engine leaves free, or a few of them.

    Args:
        num_threads: number of threads that compute a forward pass.
    """
    cores = num_cores()
    return max(cores - num_threads, cores * _SHARE)


class LoadQueue:
    """Loads shipped processors in threads, a few at a time. Thread-safe.

    Guarantees:
    * At most `max_loads` threads, not counting abandoned loads that the executor cannot cancel; nobody else waits in
      one.
    * A tenant whose loads have used up its `LoadBudget` waits. Others do not.
    * Tenants take turns, and one alone never uses the last thread: another tenant's load waits for no more than those
      that run.
    * A processor that several requests of a tenant wait for is loaded once. A load that nobody waits for any more is
      cancelled.
    * A processor that is loaded already waits for nothing.

    Args:
        cache: loads and keeps the processors.
        max_loads: most loads at a time.
        max_waiting: most loads of a tenant that wait.
        budget: the time that the loads of each tenant may use; None: any.
        clock: returns seconds.
        sleep: waits some seconds.
    """

    def __init__(
        self,
        cache: ProcessorCache,
        *,
        max_loads: int = MAX_LOADS,
        max_waiting: int = MAX_WAITING,
        budget: LoadBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cache = cache
        self._max_loads = max_loads
        self._max_waiting = max_waiting
        self._budget = budget or LoadBudget(math.inf)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._loads: dict[Key, _Load] = {}
        self._waiting: RoundRobinQueue[_Load] = RoundRobinQueue(max_waiting)
        self._running: list[_Load] = []
        self._resting: Counter[str] = Counter()
        """Threads of each tenant that wait until its next load may begin."""
        self._failures: OrderedDict[Key, tuple[float, ProcessorLoadError]] = OrderedDict()
        """Key → (time until which it is refused, reason); the oldest first."""

    async def acquire(self, string: Runnable, tenant: str) -> LoadedProcessor:
        """As `ProcessorCache.acquire`, without blocking. Cancelling it leaves the queue at once.

        Raises:
            ProcessorLoadError: the processor cannot be loaded; or could not, a moment ago.
            ExecutorUnavailable: no processor can be loaded now.
            ProcessorCacheFull: the cache is full of processors that are in use.
            LoadQueueFull: too many processors of the tenant wait.
        """
        processor = self._cache.acquire_ready(string, tenant)
        if processor is not None:
            return processor
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LoadedProcessor] = loop.create_future()
        waiter = self.begin(string, tenant, partial(self._tell, loop, future))
        try:
            return await future
        except asyncio.CancelledError:
            self.leave(waiter)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._cache.release(future.result())  # it arrived at the last moment
            raise

    def begin(self, string: Runnable, tenant: str, deliver: Callable[[Outcome], None]) -> LoadWaiter:
        """Begin to load a processor, or wait for a load of it, without an event loop.

        Args:
            string: the processor.
            tenant: its owner.
            deliver: gets the processor or the error, see `LoadWaiter`.

        Raises:
            ProcessorLoadError: it could not be loaded a moment ago.
            LoadQueueFull: too many processors of the tenant wait.
        """
        key = (tenant, string.digest)
        with self._lock:
            load = self._loads.get(key) or self._new_load(key, string)
            waiter = LoadWaiter(load, deliver)
            load.waiters.append(waiter)
            self._start_loads()
        return waiter

    def leave(self, waiter: LoadWaiter) -> None:
        """Remove a waiter that no longer waits, and its load if it was the last one."""
        load = waiter.load
        with self._lock:
            with contextlib.suppress(ValueError):
                load.waiters.remove(waiter)
            if not load.waiters and self._loads.get(load.key) is load:
                self._drop(load)

    def stats(self) -> LoadStats:
        """Return the numbers of loads."""
        with self._lock:
            return LoadStats(len(self._running), len(self._waiting))

    def _new_load(self, key: Key, string: Runnable) -> _Load:
        self._check_failed(key)
        load = _Load(key, string)
        try:
            self._waiting.put(key[0], load)
        except TenantQueueFull:
            raise LoadQueueFull(
                f"{self._max_waiting} processors of this API key wait to be loaded already: try again later"
            ) from None
        self._loads[key] = load
        return load

    def _check_failed(self, key: Key) -> None:
        until, error = self._failures.get(key, (0.0, None))
        left = until - self._clock()
        if error is not None and left > 0:
            raise failed_before(str(error), left)

    def _start_loads(self) -> None:
        """Start loads in turn. The caller holds the lock."""
        while len(self._running) < self._max_loads and (taken := self._waiting.get(self._may_load)) is not None:
            _, load = taken
            try:
                threading.Thread(target=self._run, args=(load,), name="logitship-load", daemon=True).start()
            except RuntimeError:
                del self._loads[load.key]
                self._settle(load.waiters, ExecutorUnavailable("no thread can be started to load it: try again later"))
            else:
                load.runs = True
                self._running.append(load)

    def _may_load(self, tenant: str) -> bool:
        num_running = sum(load.key[0] == tenant for load in self._running)
        return num_running + self._resting[tenant] < max(1, self._max_loads - 1)

    def _run(self, load: _Load) -> None:
        tenant, began = load.key[0], self._clock()
        outcome = self._outcome(load)
        with self._lock:
            pause = self._budget.use(tenant, self._clock() - began)
            if pause:
                self._resting[tenant] += 1
            if self._loads.get(load.key) is load:
                del self._loads[load.key]
            if load in self._running:
                self._running.remove(load)
            if isinstance(outcome, ProcessorLoadError) and not load.abandoned:
                self._remember(load.key, outcome)
            waiters, load.waiters = load.waiters, []
            self._start_loads()
        self._settle(waiters, outcome)
        if pause:
            self._sleep(pause)
            with self._lock:
                self._resting[tenant] -= 1
                self._start_loads()

    def _outcome(self, load: _Load) -> Outcome:
        try:
            return self._cache.acquire(load.string, load.key[0])
        # It is raised where the processor is awaited.
        except BaseException as error:  # boundary: event loop
            if not isinstance(error, _EXPECTED):
                logger.exception("a processor cannot be loaded")
            # Its frames hold the sandbox.
            error.__context__ = error.__cause__ = None
            return error.with_traceback(None)

    def _remember(self, key: Key, error: ProcessorLoadError) -> None:
        self._failures.pop(key, None)  # it becomes the last
        self._failures[key] = self._clock() + FAILURE_TTL, error
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _settle(self, waiters: list[LoadWaiter], outcome: Outcome) -> None:
        """Give each waiter the processor, which was acquired once, or the error."""
        if not waiters:
            self._release(outcome)
        if isinstance(outcome, LoadedProcessor):
            for _ in waiters[1:]:
                self._cache.acquire_again(outcome)
        for waiter in waiters:
            # An error of its own: raising adds to its traceback.
            waiter.deliver(_copy(outcome) if isinstance(outcome, _EXPECTED) else outcome)

    def _tell(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[LoadedProcessor], outcome: Outcome) -> None:
        try:
            loop.call_soon_threadsafe(self._resolve, future, outcome)
        except RuntimeError:  # its event loop is closed
            self._release(outcome)

    def _resolve(self, future: asyncio.Future[LoadedProcessor], outcome: Outcome) -> None:
        if future.cancelled():
            self._release(outcome)
        elif isinstance(outcome, LoadedProcessor):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _release(self, outcome: Outcome) -> None:
        if isinstance(outcome, LoadedProcessor):
            self._cache.release(outcome)

    def _drop(self, load: _Load) -> None:
        """Cancel a load. The caller holds the lock, so that no other load of the processor begins meanwhile."""
        del self._loads[load.key]
        tenant, digest = load.key
        if load.runs:
            load.abandoned = True
            if not self._cache.cancel_load(digest, tenant):
                self._running.remove(load)  # its thread may never end
                self._start_loads()
        else:
            self._waiting.remove(tenant, load)


def _copy(error: BaseException) -> BaseException:
    """Return the same exception without its traceback."""
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied
