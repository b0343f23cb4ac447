from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest

from logitship.server.engine import engine_thread
from logitship.server.engine.engine_thread import EngineThread, free_unused_memory, trim_freed_memory

BLOCK = 1 << 14
"""Bytes; small enough for the allocator's heap, and larger than a page."""


class Dying:
    """An engine whose step raises."""

    def step(self) -> bool:
        raise KeyboardInterrupt


def test_on_death_is_called_before_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the log may fail, and clients must not wait for the engine then."""
    order: list[str] = []
    logged = Event()

    def critical(message: str, **options: Any) -> None:
        order.append(message)
        logged.set()

    monkeypatch.setattr(engine_thread.logger, "critical", critical)
    thread = EngineThread()
    thread.start(Dying(), after_step=lambda: None, on_death=lambda: order.append("on_death"))
    assert logged.wait(60)
    assert order == ["on_death", "the engine's thread died"]


def test_call_runs_on_the_thread() -> None:
    thread = EngineThread()
    engine_thread_object = thread.call(threading.current_thread)
    assert engine_thread_object.name == "logitship-engine"
    assert engine_thread_object is thread.call(threading.current_thread)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    assert thread.alive
    thread.stop(60)
    assert not thread.alive


def test_stop_while_the_model_loads_reports_no_step(caplog: pytest.LogCaptureFixture) -> None:
    thread, loads = EngineThread(), Event()
    thread.post(lambda: loads.wait(60))
    thread.stop(timeout=0)
    assert thread.alive
    assert not caplog.records
    loads.set()
    thread.stop(60)
    assert not thread.alive


def test_stop_reports_a_step_that_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    stepping, ends = Event(), Event()

    class Hanging:
        def step(self) -> bool:
            stepping.set()
            ends.wait(60)
            return False

    thread = EngineThread()
    thread.start(Hanging(), after_step=lambda: None, on_death=lambda: None)
    assert stepping.wait(60)
    thread.stop(timeout=0)
    assert "the engine's step does not end" in caplog.text
    ends.set()
    thread.stop(60)


def test_stop_ends_a_busy_thread_after_its_inbox() -> None:
    stepping, ends, received = Event(), Event(), Event()

    class Endless:
        def step(self) -> bool:
            stepping.set()
            assert ends.wait(60)
            return True

    thread = EngineThread()
    thread.start(Endless(), after_step=lambda: None, on_death=lambda: None)
    assert stepping.wait(60)
    thread.stop(timeout=0)
    thread.post(received.set)
    ends.set()
    thread.stop(60)
    assert received.is_set()
    assert not thread.alive


class Idle:
    """An engine that has nothing to do."""

    def step(self) -> bool:
        return False


def test_idle_thread_frees_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = Semaphore(0)
    thread = EngineThread()
    thread.start(Idle(), after_step=lambda: None, on_death=lambda: None)

    def free() -> None:
        if threading.current_thread() is thread._thread:  # other tests' threads may be idle as well
            freed.release()

    def observe() -> None:
        monkeypatch.setattr(engine_thread, "IDLE", 0.01)
        monkeypatch.setattr(engine_thread, "LONG_IDLE", 0.01)
        monkeypatch.setattr(engine_thread, "free_unused_memory", free)

    thread.call(observe)  # not before: it may have been idle until it was started
    for _ in range(3):
        assert freed.acquire(timeout=60)
        assert freed.acquire(timeout=60)
        # Twice while idle, and again after the thread has done something.
        assert not freed.acquire(timeout=0.2)
        thread.call(lambda: None)
    thread.stop(60)
    assert not thread.alive


class Cycle:
    """An object that only itself refers to."""

    def __init__(self) -> None:
        self.itself = self


def test_free_unused_memory_frees_cycles() -> None:
    freed = weakref.ref(Cycle())
    assert freed() is not None
    free_unused_memory()
    assert freed() is None


class Busy:
    """An engine that always has something to do. It makes a cycle when the one before has been freed."""

    def __init__(self) -> None:
        self.made: weakref.ref[Cycle] | None = None
        self.freed = Semaphore(0)

    def step(self) -> bool:
        if self.made is None or self.made() is None:
            if self.made is not None:
                self.freed.release()
            self.made = weakref.ref(Cycle())
        return True


@pytest.fixture
def own_garbage_settings() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)  # what is frozen stays so, as in tests/conftest.py


@pytest.mark.usefixtures("own_garbage_settings")
def test_busy_thread_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_COLLECTION_INTERVAL", 0.0)
    thread, engine = EngineThread(), Busy()
    thread.take_over_garbage_collection()
    gc.disable()
    try:
        thread.start(engine, after_step=lambda: None, on_death=lambda: None)
        for _ in range(3):
            assert engine.freed.acquire(timeout=60)
    finally:
        gc.enable()
        thread.stop(60)
    assert not thread.alive


@pytest.mark.usefixtures("own_garbage_settings")
def test_python_makes_no_full_collection_of_its_own() -> None:
    thread = EngineThread()
    thread.take_over_garbage_collection()
    generations, own = [], threading.get_ident()

    def observe(phase: str, info: dict[str, int]) -> None:
        # Engines make full collections on their own threads.
        if phase == "start" and threading.get_ident() == own:
            generations.append(info["generation"])

    gc.callbacks.append(observe)
    try:
        kept = [[number] for number in range(200_000)]
    finally:
        gc.callbacks.remove(observe)
    assert kept
    assert generations
    assert 2 not in generations
    thread.stop(60)


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_trim_freed_memory_between_used_blocks() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK) for _ in range(10_000)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    # Keep every hundredth block, so that the heap cannot shrink from its end.
    for number, block in enumerate(blocks):
        if number % 100:
            libc.free(block)
    before = resident_pages()
    assert trim_freed_memory()
    trimmed = (before - resident_pages()) * 4096
    for block in blocks[::100]:
        assert ctypes.string_at(block, BLOCK) == b"\x01" * BLOCK
        libc.free(block)
    assert trimmed > 100 * 2**20


@pytest.mark.parametrize("steps", [True, False])
def test_only_a_step_that_hangs_is_an_error(steps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Loading a model takes long too, and a signal may end it."""
    thread, reached, released = EngineThread(), Event(), Event()
    if steps:
        thread.start(Idle(), after_step=lambda: None, on_death=lambda: None)

    def hang() -> None:
        reached.set()
        assert released.wait(60)

    thread.post(hang)
    assert reached.wait(60)
    thread.stop(0)
    assert ("a processor in it may never return" in caplog.text) == steps
    released.set()
    thread.stop(60)
