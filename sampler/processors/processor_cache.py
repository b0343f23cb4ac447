"""Loaded processors by tenant and digest: bounded, least recently used first, never one that is in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor

from .executor import LoadedProcessor, ProcessorExecutor

Key: TypeAlias = tuple[str, str]
"""Tenant and digest: two tenants never share a processor, because a class may keep things on itself."""


class ProcessorCacheFull(Exception):
    """Every processor in the cache is in use and there is no room for another. Try again later."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start, and what is loaded now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


@dataclass
class _Entry:
    """A place in the cache, taken before its processor is loaded."""

    size: int
    displaced: list[LoadedProcessor]
    """What makes way for it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the processor is loaded or made ready again, so that this is not done twice at once."""
    processor: LoadedProcessor | None = None
    users: int = 0


class ProcessorCache:
    """Loads processors through a executor and keeps them. Safe to use from several threads.

    Guarantees:
    * The executor never holds more than `max_entries` processors, those that it is loading included: the place is taken
      before the load, and what makes way is unloaded before it. (What `clear` drops may overlap with what comes.)
    * A processor that was acquired stays loaded until it is released.
    * The executor is called outside the lock of the cache: a load that takes long holds up nobody who wants another
      processor.

    Args:
        max_entries: most processors that are kept.
        max_bytes: most bytes that they count for, all together.
    """

    def __init__(self, executor: ProcessorExecutor, *, max_entries: int, max_bytes: int) -> None:
        self._executor = executor
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._hits = self._misses = self._evictions = self._bytes = 0

    def acquire(self, string: PickledProcessor | SourceProcessor, tenant: str = "") -> LoadedProcessor:
        """The loaded processor of a string. It stays loaded until `release` was called as often as this.

        Args:
            tenant: whose processor it is.

        Raises:
            ProcessorLoadError: it cannot be loaded, or is larger than the whole cache.
            ProcessorCacheFull: those in use leave no room.
        """
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        key = (tenant, runnable.digest)
        entry = self._enter(key, _size(runnable))
        try:
            with entry.lock:  # the first loads, the others wait for it
                if entry.processor is None:
                    self._unload(entry.displaced)
                    entry.processor = self._load(key, runnable)
                else:
                    with self._lock:
                        self._hits += 1
                    self._executor.ensure(entry.processor)
                return entry.processor
        except BaseException:
            with self._lock:
                self._leave(key, entry)
            raise

    def release(self, processor: LoadedProcessor) -> None:
        """Say that one user of `processor` is done."""
        key = (processor.tenant, processor.digest)
        with self._lock:
            self._entries.move_to_end(key)
            self._leave(key, self._entries[key])

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        with self._lock:
            loaded = [entry for entry in self._entries.values() if entry.processor is not None]
            nbytes = sum(entry.size for entry in loaded)
            return CacheStats(self._hits, self._misses, self._evictions, len(loaded), nbytes)

    def clear(self) -> None:
        """Drop every processor that is not in use."""
        with self._lock:
            dropped = [self._drop(key) for key in self._idle()]
        self._unload(dropped)

    def _enter(self, key: Key, size: int) -> _Entry:
        """The place of a processor, as one more user of it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(size, self._make_room(size))
                self._bytes += size
            entry.users += 1
            self._entries.move_to_end(key)  # the most recently used stands last
            return entry

    def _make_room(self, size: int) -> list[LoadedProcessor]:
        """Evict what one more processor needs, or nothing at all if that would not be enough."""
        if size > self._max_bytes:
            raise ProcessorLoadError(
                f"the processor counts for {size} bytes, more than the {self._max_bytes} that the server keeps of all "
                "processors together"
            )
        idle = self._idle()
        entries, nbytes, evicted = len(self._entries) + 1, self._bytes + size, 0
        while entries > self._max_entries or nbytes > self._max_bytes:
            if evicted == len(idle):
                raise ProcessorCacheFull("the server holds as many processors as it may, all in use: try again later")
            entries, nbytes = entries - 1, nbytes - self._entries[idle[evicted]].size
            evicted += 1
        self._evictions += evicted
        return [self._drop(key) for key in idle[:evicted]]

    def _load(self, key: Key, runnable: PickledProcessor | SourceProcessor) -> LoadedProcessor:
        with self._lock:
            self._misses += 1
        processor = self._executor.load(runnable, key[0])
        if (processor.tenant, processor.digest) != key:
            self._executor.unload(processor)
            raise ProcessorLoadError(f"the executor loaded {processor.digest}, asked for {runnable.digest}")
        return processor

    def _unload(self, processors: list[LoadedProcessor]) -> None:
        while processors:
            self._executor.unload(processors.pop())

    def _idle(self) -> list[Key]:
        return [key for key, entry in self._entries.items() if entry.users == 0]

    def _leave(self, key: Key, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and entry.processor is None:
            self._forget(key)

    def _drop(self, key: Key) -> LoadedProcessor:
        processor = self._forget(key).processor
        assert processor is not None  # one that is being loaded is in use
        return processor

    def _forget(self, key: Key) -> _Entry:
        entry = self._entries.pop(key)
        self._bytes -= entry.size
        return entry


def _size(string: PickledProcessor | SourceProcessor) -> int:
    if isinstance(string, PickledProcessor):
        return len(string.payload)
    return len(string.source.encode()) + len(string.captured)
