"""LRU cache of loaded processors by tenant and digest, fair to tenants. Never evicts one that is in use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor

from .executor import LoadedProcessor, ProcessorExecutor

Key: TypeAlias = tuple[str, str]
"""Tenant and digest. Two tenants never share a processor, because a class may keep state on itself."""


Runnable: TypeAlias = PickledProcessor | SourceProcessor


class ProcessorCacheFull(Exception):
    """The cache has no capacity for another processor of the tenant, whatever is evicted. Try again later."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start, and current size."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


@dataclass
class _Entry:
    """An entry of the cache, reserved before its processor is loaded."""

    size: int
    has_artifacts: bool
    displaced: list[LoadedProcessor]
    """Processors that are evicted for it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the processor is loaded or reloaded, so that this does not happen twice at once."""
    processor: LoadedProcessor | None = None
    users: int = 0
    idle_since: float = 0.0
    """Time at which the last user released it."""


def _noop(tenant: str) -> None:
    pass


def _unchanged(string: Runnable, tenant: str) -> Runnable:
    return string


class ProcessorCache:
    """Loads processors through an executor and caches them. Thread-safe.

    Guarantees:
    * The executor never holds more than `max_entries` processors, including those being loaded: the entry is reserved
      and evicted processors are unloaded before the load. (Processors dropped by `clear` or after `idle_timeout`
      may overlap with new ones.)
    * An acquired processor stays loaded until it is released.
    * A tenant that uses no processor can load one of up to `max_bytes // max_entries` bytes, whatever the others use,
      if the other tenants are at most half as many as the entries. A tenant's idle processors are evicted before those
      of tenants that have fewer.
    * A processor that is idle for `idle_timeout` is unloaded by a thread that exists only while there are idle ones.
    * The executor is called outside the cache's lock: a slow load does not block requests for other processors.

    Args:
        executor: loads and unloads the processors.
        max_entries: maximum number of processors.
        max_bytes: maximum total size of the processors in bytes.
        num_tenants: number of tenants that may load processors.
        before_load: called with the tenant before an entry is reserved for a processor; may raise to refuse it.
        resolve: returns a string with its artifacts, given the tenant. Called before the executor loads it.
        check_loaded: called with a processor that was loaded; may raise to refuse it. None: nothing is.
        idle_timeout: seconds; None: idle processors stay until they are evicted.
        clock: returns seconds.
    """

    def __init__(
        self,
        executor: ProcessorExecutor,
        *,
        max_entries: int,
        max_bytes: int,
        num_tenants: int = 1,
        before_load: Callable[[str], None] = _noop,
        resolve: Callable[[Runnable, str], Runnable] = _unchanged,
        check_loaded: Callable[[LoadedProcessor], None] | None = None,
        idle_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._num_tenants = num_tenants
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._before_load = before_load
        self._resolve = resolve
        self._check_loaded = check_loaded
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._hits = self._misses = self._evictions = self._bytes = 0

    def acquire(self, string: PickledProcessor | SourceProcessor, tenant: str = "") -> LoadedProcessor:
        """Return the loaded processor of a string. It stays loaded until `release` is called as often as this.

        Args:
            string: the processor string.
            tenant: owner of the processor.

        Raises:
            ProcessorLoadError: the processor cannot be loaded, or is larger than the whole cache.
            ExecutorUnavailable: no processor can be loaded now.
            ProcessorCacheFull: the cache is full of processors that are in use.
        """
        runnable = _runnable(string)
        key = (tenant, runnable.digest)
        entry = self._enter(key, _size(runnable), has_artifacts=bool(runnable.artifacts))
        try:
            with entry.lock:  # the first caller loads, the others wait
                if entry.processor is None:
                    self._unload(entry.displaced)
                    entry.processor = self._load(key, runnable)
                else:
                    with self._lock:
                        self._hits += 1
                    self._executor.ensure(entry.processor)
                return entry.processor
        except BaseException:  # cleanup, then re-raised
            with self._lock:
                self._release_entry(key, entry)
            raise

    def acquire_ready(self, string: PickledProcessor | SourceProcessor, tenant: str = "") -> LoadedProcessor | None:
        """As `acquire` if that needs no load. Return None otherwise. Never waits for a load.

        Raises:
            ProcessorLoadError: no form of the processor runs on this Python.
        """
        key = (tenant, _runnable(string).digest)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.processor is None or not self._executor.is_ready(entry.processor):
                return None
            self._hits += 1
            entry.users += 1
            self._entries.move_to_end(key)
            return entry.processor

    def acquire_again(self, processor: LoadedProcessor) -> None:
        """Acquire a processor once more, for another user, while it is acquired."""
        with self._lock:
            self._hits += 1
            self._entries[processor.tenant, processor.digest].users += 1

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """Make the `acquire` that loads a processor fail soon, see `ProcessorExecutor.cancel_load`."""
        return self._executor.cancel_load(digest, tenant)

    def release(self, processor: LoadedProcessor) -> None:
        """Release a processor that was acquired."""
        key = (processor.tenant, processor.digest)
        with self._lock:
            self._entries.move_to_end(key)
            self._release_entry(key, self._entries[key])

    def stats(self) -> CacheStats:
        """Return counters and sizes."""
        with self._lock:
            loaded = [entry for entry in self._entries.values() if entry.processor is not None]
            nbytes = sum(entry.size for entry in loaded)
            return CacheStats(self._hits, self._misses, self._evictions, len(loaded), nbytes)

    def clear(self) -> None:
        """Drop every processor that is not in use."""
        with self._lock:
            dropped = [self._drop(key) for key in self._idle()]
            timer, self._timer = self._timer, None
        _end(timer)
        self._unload(dropped)

    def close(self) -> None:
        """End the thread that unloads idle processors, and start no other one. The executor ends the processors."""
        with self._lock:
            self._idle_timeout = None
            timer, self._timer = self._timer, None
        _end(timer)

    def unload_idle(self) -> None:
        """Unload the processors that have been idle for `idle_timeout`."""
        with self._lock:
            if self._idle_timeout is None:
                return
            latest = self._clock() - self._idle_timeout
            dropped = [self._drop(key) for key in self._idle() if self._entries[key].idle_since <= latest]
            if self._timer is threading.current_thread():
                self._timer = None
            self._start_timer()
        self._unload(dropped)

    def _start_timer(self) -> None:
        """Start the thread that unloads the next processor when it is due. The caller holds the lock."""
        idle = self._idle()
        if self._idle_timeout is None or self._timer is not None or not idle:
            return
        due = min(self._entries[key].idle_since for key in idle) + self._idle_timeout
        timer = threading.Timer(max(0.0, due - self._clock()), self.unload_idle)
        timer.name, timer.daemon = "logitship-idle", True
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the next release tries again
            timer.start()
            self._timer = timer

    def unload(self, processor: LoadedProcessor) -> None:
        """Unload a processor that was released, unless somebody has acquired it again."""
        key = (processor.tenant, processor.digest)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.users or entry.processor is not processor:
                return
            dropped = self._drop(key)
        self._executor.unload(dropped)

    def evict_with_artifacts(self, tenant: str) -> bool:
        """Unload the tenant's least recently used idle processor that has artifacts. Return whether there was one."""
        with self._lock:
            keys = (key for key in self._idle() if key[0] == tenant and self._entries[key].has_artifacts)
            key = next(keys, None)
            if key is None:
                return False
            self._evictions += 1
            evicted = self._drop(key)
        self._executor.unload(evicted)
        return True

    def _enter(self, key: Key, size: int, *, has_artifacts: bool) -> _Entry:
        """Return the processor's entry, new or existing, with one more user."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._before_load(key[0])
                entry = self._entries[key] = _Entry(size, has_artifacts, self._evict_for(key[0], size))
                self._bytes += size
            entry.users += 1
            self._entries.move_to_end(key)  # most recently used last
            return entry

    def _evict_for(self, tenant: str, size: int) -> list[LoadedProcessor]:
        """Evict enough idle processors for one more, or none if that would not be enough."""
        self._check_capacity(tenant, size)
        entries, nbytes, evicted = len(self._entries) + 1, self._bytes + size, list[LoadedProcessor]()
        while entries > self._max_entries or nbytes > self._max_bytes:
            entries, nbytes = entries - 1, nbytes - self._entries[key := self._idle_to_evict(tenant)].size
            evicted.append(self._drop(key))
        self._evictions += len(evicted)
        return evicted

    def _check_capacity(self, tenant: str, size: int) -> None:
        """Refuse a processor for which evicting all idle ones would not be enough, or that takes a reserved entry."""
        if size > self._max_bytes:
            raise ProcessorLoadError(
                f"the processor has {size} bytes, more than the server's limit of {self._max_bytes} for all processors "
                "together"
            )
        used = [entry.size for entry in self._entries.values() if entry.users]
        free, free_bytes = self._max_entries - len(used) - 1, self._max_bytes - sum(used) - size
        if free < 0 or free_bytes < 0:
            raise ProcessorCacheFull(
                "the server's processor cache is full and all its processors are in use: try again later"
            )
        reserved = self._reserved_against(tenant)
        if free < reserved or free_bytes < reserved * (self._max_bytes // self._max_entries):
            raise ProcessorCacheFull(
                "the rest of the server's processor cache is reserved for other API keys: try again later, when fewer "
                "of this one's processors are in use"
            )

    def _reserved_against(self, tenant: str) -> int:
        """Return the number of entries that the tenant may not take: one for each tenant that uses none."""
        using = {owner for (owner, _), entry in self._entries.items() if entry.users}
        if tenant not in using:
            return 0
        return min(max(0, self._num_tenants - len(using)), self._max_entries // 2)

    def _idle_to_evict(self, tenant: str) -> Key:
        """Return the least recently used idle processor of the tenant with the most; of `tenant` if it has as many."""
        count = Counter(owner for owner, _ in self._entries)
        count[tenant] += 1
        return max(self._idle(), key=lambda key: (count[key[0]], key[0] == tenant))  # the first of equals

    def _load(self, key: Key, runnable: PickledProcessor | SourceProcessor) -> LoadedProcessor:
        with self._lock:
            self._misses += 1
        processor = self._executor.load(self._resolve(runnable, key[0]), key[0])
        if (processor.tenant, processor.digest) != key:
            self._executor.unload(processor)
            raise ProcessorLoadError(f"the executor loaded {processor.digest}, asked for {runnable.digest}")
        try:
            if self._check_loaded is not None:
                self._check_loaded(processor)
        except BaseException:  # cleanup, then re-raised
            self._executor.unload(processor)
            raise
        return processor

    def _unload(self, processors: list[LoadedProcessor]) -> None:
        while processors:
            self._executor.unload(processors.pop())

    def _idle(self) -> list[Key]:
        return [key for key, entry in self._entries.items() if entry.users == 0]

    def _release_entry(self, key: Key, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and entry.processor is None:
            self._remove(key)
        elif entry.users == 0:
            entry.idle_since = self._clock()
            self._start_timer()

    def _drop(self, key: Key) -> LoadedProcessor:
        processor = self._remove(key).processor
        assert processor is not None  # a processor that is being loaded has users
        return processor

    def _remove(self, key: Key) -> _Entry:
        entry = self._entries.pop(key)
        self._bytes -= entry.size
        return entry


def _end(timer: threading.Timer | None) -> None:
    """Cancel a timer, and wait until its thread has ended."""
    if timer is not None:
        timer.cancel()
        timer.join()


def _runnable(string: PickledProcessor | SourceProcessor) -> PickledProcessor | SourceProcessor:
    return string.runnable if isinstance(string, PickledProcessor) else string


def _size(string: PickledProcessor | SourceProcessor) -> int:
    """Return the bytes of a string that the executor keeps. Uploaded artifacts count in their own store."""
    if isinstance(string, PickledProcessor):
        return len(string.payload) + (0 if string.listing is None else len(string.listing.text.encode()))
    shared = sum(len(each.content.data) for each in string.artifacts if each.content is not None)
    return len(string.source.encode()) + len(string.captured) + shared
