"""Loaded processors by digest: bounded, least recently used first, never one that is in use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import PickledProcessor, SourceProcessor

from .processor_host import LoadedProcessor, ProcessorHost


class ProcessorCacheFull(Exception):
    """Every processor in the cache is in use and there is no room for another. Try again later."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start, and what is in the cache now."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


@dataclass
class _Entry:
    """A place in the cache, taken before its processor is loaded so that nobody loads it twice."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    processor: LoadedProcessor | None = None
    users: int = 0


class ProcessorCache:
    """Loads processors through a host and keeps them. Safe to use from several threads.

    Args:
        max_entries: most processors that are kept.
        max_bytes: most bytes that they count for, all together.
    """

    def __init__(self, host: ProcessorHost, *, max_entries: int, max_bytes: int) -> None:
        self._host = host
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._hits = self._misses = self._evictions = self._bytes = 0

    def acquire(self, string: PickledProcessor | SourceProcessor) -> LoadedProcessor:
        """The loaded processor of a string. It stays loaded until `release` was called as often as this.

        Raises:
            ProcessorLoadError: it cannot be loaded, or is larger than the whole cache.
            ProcessorCacheFull: those in use leave no room.
        """
        runnable = string.runnable if isinstance(string, PickledProcessor) else string
        with self._lock:
            entry = self._entries.setdefault(runnable.digest, _Entry())
            entry.users += 1
            self._entries.move_to_end(runnable.digest)  # the most recently used stands last
        try:
            with entry.lock:  # the first loads, the others wait for it
                if entry.processor is None:
                    self._load(entry, runnable)
                else:
                    with self._lock:
                        self._hits += 1
                assert entry.processor is not None
                return entry.processor
        except BaseException:
            with self._lock:
                self._leave(runnable.digest, entry)
            raise

    def release(self, processor: LoadedProcessor) -> None:
        """Say that one user of `processor` is done."""
        with self._lock:
            self._entries.move_to_end(processor.digest)
            self._leave(processor.digest, self._entries[processor.digest])

    def stats(self) -> CacheStats:
        """Counters and sizes."""
        with self._lock:
            loaded = sum(entry.processor is not None for entry in self._entries.values())
            return CacheStats(self._hits, self._misses, self._evictions, loaded, self._bytes)

    def clear(self) -> None:
        """Drop every processor that is not in use."""
        with self._lock:
            for digest in [digest for digest, entry in self._entries.items() if entry.users == 0]:
                self._drop(digest)

    def _load(self, entry: _Entry, runnable: PickledProcessor | SourceProcessor) -> None:
        with self._lock:
            self._misses += 1
        processor = self._host.load(runnable)
        if processor.digest != runnable.digest:
            raise ProcessorLoadError(f"the host loaded {processor.digest}, asked for {runnable.digest}")
        if processor.size > self._max_bytes:
            raise ProcessorLoadError(
                f"processor {processor.name} counts for {processor.size} bytes, more than the {self._max_bytes} that "
                "the server keeps of all processors together"
            )
        with self._lock:
            self._make_room(processor.size)
            entry.processor = processor
            self._bytes += processor.size

    def _make_room(self, size: int) -> None:
        """Evict what one more processor needs, or nothing at all if that would not be enough."""
        loaded = {digest: entry for digest, entry in self._entries.items() if entry.processor is not None}
        idle = [digest for digest, entry in loaded.items() if entry.users == 0]
        entries, nbytes = len(loaded) + 1, self._bytes + size
        evicted = []
        while entries > self._max_entries or nbytes > self._max_bytes:
            if not idle:
                raise ProcessorCacheFull("the server holds as many processors as it may, all in use: try again later")
            evicted.append(idle.pop(0))
            entries, nbytes = entries - 1, nbytes - _size(loaded[evicted[-1]])
        for digest in evicted:
            self._drop(digest)
        self._evictions += len(evicted)

    def _leave(self, digest: str, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users == 0 and entry.processor is None:
            self._entries.pop(digest, None)

    def _drop(self, digest: str) -> None:
        self._bytes -= _size(self._entries.pop(digest))


def _size(entry: _Entry) -> int:
    assert entry.processor is not None
    return entry.processor.size
