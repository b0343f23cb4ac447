from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import PickledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.processors.executor import LoadedProcessor
from logitship.sampler.processors.processor_cache import CacheStats, ProcessorCache, ProcessorCacheFull
from tests.helpers.random_cases import random_seeds


class CountingExecutor:
    """An executor that loads nothing and counts its calls."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.loading = threading.Semaphore(0)
        self.may_load = threading.Event()
        self.may_load.set()
        self.errors: list[BaseException] = []
        self.ensured: list[LoadedProcessor] = []
        self.unloaded: list[str] = []
        self.ready = True
        self.most = 0
        """Maximum number of processors held at a time, including those being loaded."""
        self._held = 0
        self._lock = threading.Lock()

    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        assert isinstance(string, SourceProcessor)
        self._count(1)
        try:
            return self._load(string, tenant)
        except BaseException:
            self._count(-1)
            raise

    def _count(self, change: int) -> None:
        with self._lock:
            self._held += change
            self.most = max(self.most, self._held)

    def _load(self, string: SourceProcessor, tenant: str) -> LoadedProcessor:
        self.loads.append(string.class_name)
        self.loading.release()
        assert self.may_load.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        return LoadedProcessor(string.digest, string.class_name, self, object(), tenant=tenant)

    def ensure(self, processor: LoadedProcessor) -> None:
        self.ensured.append(processor)
        if self.errors:
            raise self.errors.pop(0)

    def is_ready(self, processor: LoadedProcessor) -> bool:
        return self.ready

    def cancel_load(self, digest: str, tenant: str) -> NoReturn:
        raise AssertionError("nothing is cancelled")

    def unload(self, processor: LoadedProcessor) -> None:
        self.unloaded.append(processor.name)
        self._count(-1)

    def attach(self, *_: Any) -> NoReturn:
        raise AssertionError("the cache runs nothing")

    def group(self, *_: Any) -> NoReturn:
        raise AssertionError("the cache runs nothing")


def string(name: str, size: int = 1) -> SourceProcessor:
    return SourceProcessor("#" * size, name)


def use_once(cache: ProcessorCache, name: str, size: int = 1) -> None:
    cache.release(cache.acquire(string(name, size)))


def test_processor_is_loaded_once() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    first = cache.acquire(string("A"))
    cache.release(first)
    assert cache.acquire(string("A")) is first
    assert executor.loads == ["A"]
    assert cache.stats() == CacheStats(hits=1, misses=1, evictions=0, entries=1, bytes=1)


def test_pickle_of_other_python_is_cached_by_source() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    processor = cache.acquire(PickledProcessor(b"pickle", python="2.7", source=string("A")))
    assert processor is cache.acquire(string("A"))
    with pytest.raises(ProcessorLoadError, match=r"Python 2\.7"):
        cache.acquire(PickledProcessor(b"pickle", python="2.7"))


def test_least_recently_used_is_evicted_first() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=3, max_bytes=100)
    for name in "ABCA":
        use_once(cache, name)
    use_once(cache, "D")
    for name in "ACD":
        use_once(cache, name)
    assert executor.loads == ["A", "B", "C", "D"]
    assert executor.unloaded == ["B"]
    assert cache.stats().evictions == 1
    use_once(cache, "B")
    assert executor.loads[-1] == "B"


def test_processor_is_in_use_until_released() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    long_used = cache.acquire(string("A"))
    use_once(cache, "B")
    cache.release(long_used)
    use_once(cache, "C")
    use_once(cache, "A")
    assert executor.loads == ["A", "B", "C"]


def test_idle_processors_with_artifacts_are_evicted_on_request() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=9, max_bytes=100)
    artifacts = (Artifact("sha256:1"),)
    use_once(cache, "A")
    for name in "BC":
        cache.release(cache.acquire(replace(string(name), artifacts=artifacts)))
    used = cache.acquire(replace(string("D"), artifacts=artifacts))
    cache.release(cache.acquire(replace(string("E"), artifacts=artifacts), "other"))
    assert cache.evict_with_artifacts("")
    assert cache.evict_with_artifacts("")
    assert not cache.evict_with_artifacts("")
    assert executor.unloaded == ["B", "C"]
    cache.release(used)
    assert (cache.stats().entries, cache.stats().evictions) == (3, 2)


def test_artifacts_in_a_string_count() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=9, max_bytes=100)
    cache.acquire(replace(string("A"), artifacts=(Artifact.of(bytes(70)), Artifact("sha256:1"))))
    assert cache.stats().bytes == 71


def test_bytes_are_limited() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=10, max_bytes=10)
    for name in "ABCDE":
        use_once(cache, name, 2)
    use_once(cache, "F", 5)
    assert cache.stats() == CacheStats(hits=0, misses=6, evictions=3, entries=3, bytes=9)


def test_processor_in_use_is_never_evicted() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    first, second = cache.acquire(string("A")), cache.acquire(string("B"))
    with pytest.raises(ProcessorCacheFull, match="try again later"):
        cache.acquire(string("C"))
    assert cache.acquire(string("A")) is first
    cache.release(first)
    with pytest.raises(ProcessorCacheFull):  # acquired twice, released once
        cache.acquire(string("C"))
    cache.release(second)
    cache.acquire(string("C"))
    assert cache.acquire(string("A")) is first
    assert cache.stats().entries == 2


def test_nothing_is_evicted_if_that_is_not_enough() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=10, max_bytes=10)
    cache.acquire(string("A", 6))
    use_once(cache, "B", 2)
    with pytest.raises(ProcessorCacheFull):
        cache.acquire(string("C", 5))
    assert cache.stats().evictions == 0
    assert cache.stats().entries == 2


def test_processor_larger_than_cache_is_rejected() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=10, max_bytes=10)
    use_once(cache, "A", 2)
    with pytest.raises(ProcessorLoadError, match="has 11 bytes, more than the server"):
        cache.acquire(string("B", 11))
    assert cache.stats().entries == 1
    assert executor.loads == ["A"]
    assert executor.unloaded == []


def test_failed_load_leaves_no_entry() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    for error in (ProcessorLoadError("broken"), KeyboardInterrupt()):
        executor.errors.append(error)
        with pytest.raises(type(error)):
            cache.acquire(string("A"))
    assert cache.stats() == CacheStats(hits=0, misses=2, evictions=0, entries=0, bytes=0)
    cache.acquire(string("A"))
    assert executor.loads == ["A"] * 3


def test_executor_that_loads_another_digest_is_rejected() -> None:
    class Confused(CountingExecutor):
        def load(self, asked: ProcessorString, tenant: str = "") -> LoadedProcessor:
            return super().load(string("other"), tenant)

    class Indiscreet(CountingExecutor):
        def load(self, asked: ProcessorString, tenant: str = "") -> LoadedProcessor:
            return super().load(asked, "another")

    for executor in (Confused(), Indiscreet()):
        cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
        with pytest.raises(ProcessorLoadError, match="the executor loaded"):
            cache.acquire(string("A"))
        assert executor.unloaded == executor.loads
        assert cache.stats().entries == 0


def test_tenants_do_not_share_processors() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=3, max_bytes=100)
    processors = [cache.acquire(string("A"), tenant) for tenant in ("", "one", "two")]
    assert len(set(processors)) == 3
    assert [processor.tenant for processor in processors] == ["", "one", "two"]
    assert len({processor.digest for processor in processors}) == 1
    assert cache.acquire(string("A"), "one") is processors[1]
    cache.release(processors[1])
    for processor in processors:
        cache.release(processor)
    assert cache.stats() == CacheStats(hits=1, misses=3, evictions=0, entries=3, bytes=3)


def test_cache_hit_calls_ensure() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    processor = cache.acquire(string("A"))
    assert executor.ensured == []
    assert cache.acquire(string("A")) is processor
    assert executor.ensured == [processor]


def test_failed_ensure_keeps_entry() -> None:
    """The next user tries again, and current users release it as usual."""
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    processor = cache.acquire(string("A"))
    executor.errors.append(ProcessorLoadError("its sandbox does not start"))
    with pytest.raises(ProcessorLoadError, match="does not start"):
        cache.acquire(string("A"))
    assert cache.acquire(string("A")) is processor
    cache.release(processor)
    cache.release(processor)
    use_once(cache, "B")  # its users were counted correctly: it can be evicted
    assert executor.unloaded == ["A"]


def test_ensure_does_not_block_other_processors() -> None:
    waiting, go_on = threading.Event(), threading.Event()

    class Slow(CountingExecutor):
        def ensure(self, processor: LoadedProcessor) -> None:
            waiting.set()
            assert go_on.wait(60)

    cache = ProcessorCache(Slow(), max_entries=2, max_bytes=100)
    use_once(cache, "A")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.acquire, string("A"))
        assert waiting.wait(60)
        cache.release(cache.acquire(string("B")))
        assert cache.stats().entries == 2
        go_on.set()
        slow.result()


def test_evicted_processor_is_unloaded_before_load() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    use_once(cache, "A")
    executor.may_load.clear()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(cache.acquire, string("B"))
        for _ in "AB":
            assert executor.loading.acquire(timeout=60)
        assert executor.unloaded == ["A"]
        with pytest.raises(ProcessorCacheFull):  # its entry is reserved
            cache.acquire(string("C"))
        executor.may_load.set()
        loading.result()
    assert executor.loads == ["A", "B"]


@random_seeds(5)
def test_threads_never_exceed_limits(seed: int) -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=3, max_bytes=100)
    together = threading.Barrier(8)

    def use(number: int) -> int:
        rng = random.Random(8 * seed + number)
        together.wait(60)
        refused = 0
        for _ in range(200):
            try:
                processor = cache.acquire(string(rng.choice("ABCDE")), rng.choice(["one", "two"]))
            except ProcessorCacheFull:
                refused += 1
            else:
                cache.release(processor)
        return refused

    with ThreadPoolExecutor(8) as pool:
        refused = sum(pool.map(use, range(8)))
    assert refused < 8 * 200
    assert executor.most <= 3
    assert len(executor.loads) == cache.stats().misses == len(executor.unloaded) + cache.stats().entries
    cache.clear()
    assert len(executor.loads) == len(executor.unloaded)


def test_clear_keeps_processors_in_use() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=3, max_bytes=100)
    used = cache.acquire(string("A"))
    use_once(cache, "B")
    cache.clear()
    assert executor.unloaded == ["B"]
    assert cache.stats() == CacheStats(hits=0, misses=2, evictions=0, entries=1, bytes=1)
    cache.release(used)
    cache.clear()
    assert cache.stats().entries == 0


def test_released_processor_is_unloaded_on_request() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=3, max_bytes=100)
    processor = cache.acquire(string("A"))
    cache.unload(processor)  # in use
    assert executor.unloaded == []
    cache.release(processor)
    cache.unload(processor)
    cache.unload(processor)  # it is gone
    assert executor.unloaded == ["A"]
    again = cache.acquire(string("A"))
    cache.release(again)
    cache.unload(processor)  # the one before
    assert executor.unloaded == ["A"]


def test_idle_processors_are_unloaded_after_the_timeout() -> None:
    """The clock is set by hand."""
    now = 0.0
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=8, max_bytes=100, idle_timeout=30, clock=lambda: now)
    used, early, late = (cache.acquire(string(name)) for name in ("Used", "Early", "Late"))
    cache.release(early)
    now = 20.0
    cache.release(late)
    cache.release(cache.acquire(string("Early")))
    cache.release(cache.acquire(string("Used")))  # it is still in use
    now = 49.0
    cache.unload_idle()
    assert executor.unloaded == []
    now = 50.0
    cache.unload_idle()
    assert sorted(executor.unloaded) == ["Early", "Late"]
    assert cache.stats().entries == 1
    assert cache.stats().evictions == 0
    cache.release(used)
    cache.clear()


def test_thread_unloads_idle_processors_and_ends() -> None:
    unloaded = threading.Event()
    executor = CountingExecutor()
    executor.unload = lambda processor: unloaded.set()  # type: ignore[method-assign]
    cache = ProcessorCache(executor, max_entries=8, max_bytes=100, idle_timeout=0.01)
    for _ in range(2):
        processor = cache.acquire(string("A"))
        assert not idle_threads(cache)
        cache.release(processor)
        assert unloaded.wait(60)
        for thread in idle_threads(cache):
            thread.join(60)
        unloaded.clear()
    assert executor.loads == ["A", "A"]


def test_clear_ends_the_thread_that_waits_for_idle_processors() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=8, max_bytes=100, idle_timeout=3600)
    cache.release(cache.acquire(string("A")))
    (thread,) = idle_threads(cache)
    cache.clear()
    thread.join(60)
    assert not thread.is_alive()


def test_closed_cache_has_no_thread() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=8, max_bytes=100, idle_timeout=3600)
    used = cache.acquire(string("A"))
    use_once(cache, "B")
    cache.close()
    assert not idle_threads(cache)
    cache.release(used)
    cache.unload_idle()
    assert not idle_threads(cache)
    assert cache.stats().entries == 2


def idle_threads(cache: ProcessorCache) -> list[threading.Timer]:
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in timers if timer.function == cache.unload_idle]


def test_concurrent_acquires_load_once() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    executor.may_load.clear()
    together = threading.Barrier(8)

    def acquire() -> LoadedProcessor:
        together.wait(60)
        return cache.acquire(string("A"))

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(acquire) for _ in range(8)]
        assert executor.loading.acquire(timeout=60)
        executor.may_load.set()
        processors = {future.result() for future in futures}
    assert len(processors) == 1
    assert executor.loads == ["A"]
    assert cache.stats() == CacheStats(hits=7, misses=1, evictions=0, entries=1, bytes=1)


def test_load_does_not_block_other_processors() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    ready = cache.acquire(string("A"))
    assert executor.loading.acquire(timeout=60)
    executor.may_load.clear()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.acquire, string("B"))
        assert executor.loading.acquire(timeout=60)
        assert cache.acquire(string("A")) is ready
        assert cache.stats().entries == 1
        executor.may_load.set()
        slow.result()


def test_waiter_retries_after_failed_load() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    executor.may_load.clear()
    executor.errors.append(ProcessorLoadError("broken"))
    together = threading.Barrier(2)

    def acquire() -> LoadedProcessor | None:
        together.wait(60)
        try:
            return cache.acquire(string("A"))
        except ProcessorLoadError:
            return None

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(acquire) for _ in range(2)]
        assert executor.loading.acquire(timeout=60)
        executor.may_load.set()
        results = [future.result() for future in futures]
    assert sorted(result is None for result in results) == [False, True]
    assert executor.loads == ["A", "A"]
    assert cache.stats().entries == 1


def test_failed_load_frees_capacity() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=1, max_bytes=100)
    executor.may_load.clear()
    executor.errors.append(ProcessorLoadError("broken"))
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(cache.acquire, string("A"))
        assert executor.loading.acquire(timeout=60)
        with pytest.raises(ProcessorCacheFull):
            cache.acquire(string("B"))
        executor.may_load.set()
        with pytest.raises(ProcessorLoadError, match="broken"):
            loading.result()
    cache.acquire(string("B"))


@random_seeds(20)
def test_random_use_matches_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    executor = CountingExecutor()
    max_entries, max_bytes = rng.randint(1, 4), rng.randint(4, 12)
    cache = ProcessorCache(executor, max_entries=max_entries, max_bytes=max_bytes)
    sizes = {name: rng.randint(1, 4) for name in "ABCDEF"}
    kept: list[str] = []  # least recently used first
    users: dict[str, list[LoadedProcessor]] = {name: [] for name in sizes}
    evictions = 0
    for _ in range(300):
        name = rng.choice("ABCDEF")
        if users[name] and rng.random() < 0.55:
            cache.release(users[name].pop())
            kept.remove(name)
            kept.append(name)
            continue
        loads_before = len(executor.loads)
        try:
            users[name].append(cache.acquire(string(name, sizes[name])))
        except ProcessorCacheFull:
            assert name not in kept
            in_use = [other for other in kept if users[other]]
            too_many = len(in_use) + 1 > max_entries
            assert too_many or sum(sizes[other] for other in in_use) + sizes[name] > max_bytes
        else:
            assert (len(executor.loads) == loads_before) == (name in kept)
            if name in kept:
                kept.remove(name)
            idle = [other for other in kept if not users[other]]
            while len(kept) + 1 > max_entries or sum(sizes[other] for other in kept) + sizes[name] > max_bytes:
                kept.remove(idle.pop(0))
                evictions += 1
            kept.append(name)
        stats = cache.stats()
        assert (stats.entries, stats.bytes) == (len(kept), sum(sizes[other] for other in kept))
    assert cache.stats().misses == len(executor.loads)
    assert cache.stats().evictions == evictions


def acquire(cache: ProcessorCache, tenant: str, names: str) -> list[LoadedProcessor]:
    return [cache.acquire(string(name), tenant) for name in names]


def test_place_is_reserved_for_each_tenant_without_one() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=6, max_bytes=100, num_tenants=3)
    greedy = acquire(cache, "greedy", "ABCD")
    with pytest.raises(ProcessorCacheFull, match="reserved for other API keys"):
        cache.acquire(string("E"), "greedy")
    (other,) = acquire(cache, "other", "A")
    for tenant in ("greedy", "other"):  # both use one, and the third does not
        with pytest.raises(ProcessorCacheFull, match="reserved"):
            cache.acquire(string("E"), tenant)
    acquire(cache, "third", "A")
    with pytest.raises(ProcessorCacheFull, match="all its processors are in use"):
        cache.acquire(string("E"), "third")
    cache.release(greedy[0])
    acquire(cache, "third", "B")
    cache.release(other)
    with pytest.raises(ProcessorCacheFull, match="reserved"):  # for the other one, which uses none now
        cache.acquire(string("F"), "third")


def test_bytes_are_reserved_like_places() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=5, max_bytes=50, num_tenants=2)
    cache.acquire(string("A", 20), "greedy")
    with pytest.raises(ProcessorCacheFull, match="reserved"):
        cache.acquire(string("B", 21), "greedy")
    cache.acquire(string("B", 20), "greedy")
    cache.acquire(string("A", 10), "other")


def test_more_tenants_than_places() -> None:
    cache = ProcessorCache(CountingExecutor(), max_entries=4, max_bytes=100, num_tenants=100)
    acquire(cache, "first", "AB")
    with pytest.raises(ProcessorCacheFull, match="reserved"):
        cache.acquire(string("C"), "first")
    acquire(cache, "second", "A")
    acquire(cache, "third", "A")


def test_idle_processors_of_the_tenant_with_the_most_are_evicted_first() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=5, max_bytes=100, num_tenants=3)
    for tenant, name in (("few", "A"), ("many", "B"), ("many", "C"), ("many", "D"), ("few", "E")):
        cache.release(cache.acquire(string(name), tenant))
    cache.acquire(string("F"), "new")
    assert executor.unloaded == ["B"]
    cache.acquire(string("G"), "few")  # both have two, and it is its own that goes
    assert executor.unloaded == ["B", "A"]


def test_ready_processor_is_acquired_without_loading() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    assert cache.acquire_ready(string("A")) is None
    processor = cache.acquire(string("A"))
    assert cache.acquire_ready(string("A")) is processor
    assert cache.acquire_ready(string("A"), "another tenant") is None
    cache.acquire_again(processor)
    executor.ready = False
    assert cache.acquire_ready(string("A")) is None
    assert executor.ensured == []
    for _ in range(3):
        cache.clear()
        assert cache.stats().entries == 1
        cache.release(processor)
    cache.clear()
    assert cache.stats() == CacheStats(hits=2, misses=1, evictions=0, entries=0, bytes=0)


def test_processor_that_is_being_loaded_is_not_ready() -> None:
    executor = CountingExecutor()
    cache = ProcessorCache(executor, max_entries=2, max_bytes=100)
    executor.may_load.clear()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(cache.acquire, string("A"))
        assert executor.loading.acquire(timeout=60)
        assert cache.acquire_ready(string("A")) is None
        executor.may_load.set()
        loading.result()


def test_before_load_may_refuse() -> None:
    executor, tenants, refusing = CountingExecutor(), [], False

    def before_load(tenant: str) -> None:
        tenants.append(tenant)
        if refusing:
            raise PermissionError(tenant)

    cache = ProcessorCache(executor, max_entries=1, max_bytes=100, before_load=before_load)
    for _ in range(3):
        cache.release(cache.acquire(string("a"), "mine"))
    assert tenants == ["mine"]  # once per load, not per use
    refusing = True
    for _ in range(2):
        with pytest.raises(PermissionError, match="mine"):
            cache.acquire(string("b"), "mine")
    # Nothing was evicted or reserved for what was refused.
    assert executor.unloaded == []
    cache.release(cache.acquire(string("a"), "mine"))
    refusing = False
    cache.release(cache.acquire(string("b"), "mine"))
    assert (executor.loads, executor.unloaded) == (["a", "b"], ["a"])
