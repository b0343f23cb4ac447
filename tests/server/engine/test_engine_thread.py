from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest

from logitship.server.engine import engine_thread
from logitship.server.engine.engine_thread import EngineThread, trim_freed_memory

BLOCK = 1 << 14
"""Bytes; small enough for the allocator's heap, and larger than a page."""


class Dying:
    """An engine whose step raises."""

    def step(self) -> bool:
        raise KeyboardInterrupt


def test_its_death_is_told_before_it_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the log may fail: nobody must wait for the engine then."""
    order: list[str] = []
    logged = Event()

    def critical(message: str, **options: Any) -> None:
        order.append(message)
        logged.set()

    monkeypatch.setattr(engine_thread.logger, "critical", critical)
    thread = EngineThread()
    thread.start(Dying(), after_step=lambda: None, on_death=lambda: order.append("told"))
    assert logged.wait(60)
    assert order == ["told", "the engine's thread died"]


def test_what_makes_the_engine_runs_on_its_thread() -> None:
    thread = EngineThread()
    made_on = thread.call(threading.current_thread)
    assert made_on.name == "logitship-engine"
    assert made_on is thread.call(threading.current_thread)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    assert thread.alive
    thread.stop(60)
    assert not thread.alive


class Idle:
    """An engine that has nothing to do."""

    def step(self) -> bool:
        return False


def test_once_idle_it_gives_back_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = Semaphore(0)
    monkeypatch.setattr(engine_thread, "IDLE", 0.01)
    monkeypatch.setattr(engine_thread, "trim_freed_memory", given_back.release)
    thread = EngineThread()
    thread.start(Idle(), after_step=lambda: None, on_death=lambda: None)
    for _ in range(3):
        assert given_back.acquire(timeout=60)
        # Not again and again while nothing happens, but once more after whatever the thread does next.
        assert not given_back.acquire(timeout=0.2)
        thread.call(lambda: None)
    thread.stop(60)
    assert not thread.alive


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_what_lies_between_blocks_in_use_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK) for _ in range(10_000)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    # Every hundredth stays, so that the heap cannot shrink from its end.
    for number, block in enumerate(blocks):
        if number % 100:
            libc.free(block)
    before = resident()
    assert trim_freed_memory()
    given_back = (before - resident()) * 4096
    for block in blocks[::100]:
        assert ctypes.string_at(block, BLOCK) == b"\x01" * BLOCK
        libc.free(block)
    assert given_back > 100 * 2**20
