"""The last resort of a shutdown: ends the process if something in it hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

GRACE = 8.0
"""Seconds that a shutdown may take beyond `--shutdown-timeout`. It stops the engine's thread, the sandboxes and the
connections in that time, unless several of them hang."""
JOIN_TIMEOUT = 3.0
"""Seconds that the process may live after the server has ended. Python waits for the jobs of `asyncio.to_thread` then,
without a limit."""

_LOG_TIMEOUT = 1.0
"""Seconds for the last log line: nobody may be reading it."""
_SERVER_ENDED = 0
"""Note in the pipe. Other bytes are numbers of signals."""


class ShutdownWatchdog:
    """Ends the process if it still runs some time after its first SIGINT or SIGTERM.

    Python writes the number of each signal to a pipe when it arrives, even if the main thread is stuck in native code.

    Args:
        timeout: value of `--shutdown-timeout`, in seconds.
        end: ends the process.
    """

    def __init__(self, timeout: float, end: Callable[[], None] | None = None) -> None:
        self._timeout = timeout
        self._end = end or ProcessEnd()
        self._deadline = float("inf")
        self._has_signal = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._run, name="logitship-watchdog", daemon=True)
        self._thread.start()

    def watch_signals(self) -> None:
        """Follow the signals that Python code handles. Main thread only."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def server_ended(self) -> None:
        """Give the rest of the process `JOIN_TIMEOUT` to end."""
        self.note(_SERVER_ENDED)

    def note(self, event: int) -> None:
        """Note the number of a signal, as Python does, or `_SERVER_ENDED`."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([event]))

    def close(self) -> None:
        """End the thread, and leave the process alone. Only without `watch_signals`."""
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _run(self) -> None:
        for event in self._events():
            self._deadline = min(self._deadline, time.monotonic() + self._allowed(event))

    def _events(self) -> Iterator[int]:
        """Yield the noted events, until the pipe is closed. End the process at the deadline."""
        while True:
            left = self._deadline - time.monotonic()
            readable, _, _ = select.select([self._read], [], [], None if left == float("inf") else max(0.0, left))
            if not readable:
                self._end()
                return
            if not (events := os.read(self._read, 64)):
                return
            yield from events

    def _allowed(self, event: int) -> float:
        """Return how many seconds the process may live on after an event."""
        if event == _SERVER_ENDED:
            return JOIN_TIMEOUT
        if event not in (signal.SIGINT, signal.SIGTERM):
            return float("inf")
        is_second, self._has_signal = self._has_signal, True
        return GRACE if is_second else self._timeout + GRACE


class ProcessEnd:
    """Ends the process with status 1, without waiting for anything.

    Its thread writes the log line, because the thread that hangs may hold the lock of the log. It starts with this
    object: Python 3.12 starts no thread while the interpreter shuts down.
    """

    def __init__(self) -> None:
        self._is_due = threading.Event()
        self._is_logged = threading.Event()
        threading.Thread(target=self._log, name="logitship-last-log", daemon=True).start()

    def __call__(self) -> None:
        """Kill the child processes, log it, and exit."""
        try:
            for pid in _child_pids():
                with contextlib.suppress(OSError):  # it has ended, or changed its user
                    os.kill(pid, signal.SIGKILL)
            self._is_due.set()
            self._is_logged.wait(_LOG_TIMEOUT)
        finally:
            os._exit(1)

    def _log(self) -> None:
        self._is_due.wait()
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()))
        logger.error("the shutdown takes too long: ending the process. These threads are still running: %s", names)
        self._is_logged.set()


def _child_pids() -> list[int]:
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, children.read_text().split())
    return found
