from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from logitship.server import shutdown_watchdog
from logitship.server.shutdown_watchdog import ShutdownWatchdog

PATIENCE = 60.0
NEVER = 10 * PATIENCE


@pytest.fixture
def make_watchdog() -> Iterator[Callable[[float], tuple[ShutdownWatchdog, threading.Event]]]:
    """Makes a watchdog with this timeout that sets an event instead of ending the process."""
    made: list[ShutdownWatchdog] = []

    def make(timeout: float) -> tuple[ShutdownWatchdog, threading.Event]:
        ended = threading.Event()
        made.append(ShutdownWatchdog(timeout, ended.set))
        return made[-1], ended

    yield make
    for watchdog in made:
        watchdog.close()


Make = Callable[[float], tuple[ShutdownWatchdog, threading.Event]]


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown_watchdog, "GRACE", 0.0)
    monkeypatch.setattr(shutdown_watchdog, "JOIN_TIMEOUT", 0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_gives_the_timeout(make_watchdog: Make, number: int) -> None:
    patient, ended = make_watchdog(NEVER)
    impatient, ended_at_once = make_watchdog(0.0)
    for watchdog in (patient, impatient):
        watchdog.note(number)
    assert ended_at_once.wait(PATIENCE)
    assert not ended.is_set()


def test_second_signal_shortens_it(make_watchdog: Make) -> None:
    watchdog, ended = make_watchdog(NEVER)
    watchdog.note(signal.SIGTERM)
    watchdog.note(signal.SIGTERM)
    assert ended.wait(PATIENCE)


def test_end_of_the_server_shortens_it(make_watchdog: Make) -> None:
    watchdog, ended = make_watchdog(NEVER)
    watchdog.note(signal.SIGTERM)
    watchdog.server_ended()
    assert ended.wait(PATIENCE)


def test_other_signals_are_ignored(make_watchdog: Make) -> None:
    watchdog, ended = make_watchdog(0.0)
    watchdog.note(signal.SIGCHLD)
    watchdog.note(signal.SIGUSR1)
    assert not ended.wait(0.1)
    watchdog.note(signal.SIGTERM)
    assert ended.wait(PATIENCE)


PROGRAM = """
import logging, signal, subprocess, sys, threading
from logitship.server import shutdown_watchdog
from logitship.server.shutdown_watchdog import ShutdownWatchdog
from concurrent.futures import ThreadPoolExecutor

logging.basicConfig()
if "log works" in sys.argv:
    shutdown_watchdog._LOG_TIMEOUT = 60.0  # the machine may be busy
else:
    logging.getLogger("logitship.server.shutdown_watchdog").handle = lambda record: threading.Event().wait()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
watchdog = ShutdownWatchdog(0.0)
watchdog.watch_signals()
signal.signal(signal.SIGTERM, lambda *_: None)
ThreadPoolExecutor(thread_name_prefix="hangs").submit(threading.Event().wait)
if "no thread starts" in sys.argv:  # as since Python 3.12 while the interpreter shuts down
    def start(thread): raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start
if "child cannot be killed" in sys.argv:
    def kill(pid, number): raise PermissionError
    shutdown_watchdog.os.kill = kill
print(child.pid, flush=True)
# Python would wait for the thread at its exit.
"""


@pytest.mark.parametrize("log", ["log works", "log hangs"])
def test_real_process(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAM.replace("ShutdownWatchdog(0.0)", "ShutdownWatchdog(-8.0)")  # without the grace
    process = subprocess.Popen(
        [sys.executable, "-c", program, log], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert ("hangs_0" in errors) == (log == "log works")
        ended, *_ = select.select([child], [], [], PATIENCE)
        assert ended == [child]
        os.close(child)
    finally:
        process.kill()


@pytest.mark.parametrize("obstacle", ["no thread starts", "child cannot be killed"])
def test_real_process_ends_whatever_fails(obstacle: str) -> None:
    program = PROGRAM.replace("ShutdownWatchdog(0.0)", "ShutdownWatchdog(-8.0)")  # without the grace
    process = subprocess.Popen(
        [sys.executable, "-c", program, "log works", obstacle],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)  # the child reads until its parent has ended
        assert process.returncode == 1
        assert "hangs_0" in errors
    finally:
        process.kill()
