"""The server's client of a checker process, see `check`."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import wait
from typing import Any

from logitship.builtin_processors.params import PreparationUnavailable

from . import check

_log = logging.getLogger(__name__)


class TooMuchMemory(ValueError):
    """An allocation failed: the grammar needs too much memory, or the machine has none left."""


class GrammarChecker:
    """Compiles grammars in a separate process, one after the other. Thread-safe.

    The process starts with the first grammar, and again with the first one after it has ended.

    Args:
        tokenizer: the arguments of `check.make_tokenizer`.
        cpu_limit: maximum CPU seconds per grammar.
        timeout: maximum seconds to wait for the process to start, and for its answer.
        idle_timeout: seconds without a grammar after which the process is ended.

    Attributes:
        took_long: True if the last grammar took long, or ended the process.
    """

    def __init__(
        self,
        tokenizer: dict[str, Any],
        cpu_limit: float = 5.0,
        timeout: float = 60.0,
        idle_timeout: float = 30.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._cpu_limit = cpu_limit
        self._timeout = timeout
        self._idle_timeout = idle_timeout
        self.took_long = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._timer: threading.Timer | None = None
        self._cancel_timer: weakref.finalize[Any, Any] | None = None

    def check(self, grammar: str, *, at_low_priority: bool = False) -> None:
        """Check that a grammar can be compiled. Blocks.

        Args:
            grammar: the grammar.
            at_low_priority: start at a low priority, rather than drop to it after a while.

        Raises:
            ValueError: it cannot be compiled, or not within the limits of time, memory and stack; says why.
            TooMuchMemory: it cannot be compiled now, and may be on a machine with more memory.
            PreparationUnavailable: it could not be checked, because the process does not start or was killed, or the
                machine is too busy.
        """
        with self._lock:
            self._stop_timer()
            try:
                self._check(grammar, at_low_priority)
            finally:
                self._start_timer()

    def close(self) -> None:
        """Kill the process. The next check starts another one."""
        with self._lock:
            self._stop_timer()
            self._kill()

    def kill_idle(self) -> None:
        """Kill the process, unless it was used since the timer that calls this was started."""
        with self._lock:
            if self._timer is threading.current_thread():
                self._kill()

    def _check(self, grammar: str, at_low_priority: bool) -> None:
        self.took_long = False
        try:
            process = self._running()
            self.took_long = True  # unless it answers otherwise
            _send(process, (grammar, at_low_priority))
            answer = self._answer(process)
            if not answer.endswith("\n"):
                self._kill()
                raise _reason_of_end(process.returncode)
        except OSError as error:  # TimeoutError among them
            self._kill()
            _log.warning("grammars cannot be checked: %r", error)
            raise PreparationUnavailable("the server is too busy to check the grammar: try again later") from None
        reason: str | None
        reason, self.took_long = json.loads(answer)
        if reason is not None:
            raise ValueError(reason)

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self._process = None

    def _start_timer(self) -> None:
        """Start the thread that ends the process when it is idle. The thread ends with this object, too."""
        if self._process is None:
            return
        self._timer = threading.Timer(self._idle_timeout, _kill_idle, [weakref.ref(self)])
        self._timer.name, self._timer.daemon = "logitship-idle", True
        self._cancel_timer = weakref.finalize(self, self._timer.cancel)
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the next check tries again
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()
        self._timer = None

    def _running(self) -> subprocess.Popen[str]:
        """Return the process; start it if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._process = subprocess.Popen(
                [sys.executable, "-I", check.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={},  # it needs nothing of it, and must not get the operator's keys
            )
            self._end = weakref.finalize(self, _end, self._process)
            _send(self._process, (self._cpu_limit, self._tokenizer))
            if not self._answer(self._process):
                raise ChildProcessError("the checker process ended before it was ready")
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> str:
        """Return the next line; empty if the process has exited."""
        assert process.stdout is not None
        if not wait([process.stdout.fileno()], self._timeout):
            raise TimeoutError(f"no answer in {self._timeout:g} seconds")
        return process.stdout.readline()


def _reason_of_end(status: int) -> Exception:
    """Return the exception for a process that ended without an answer, which another process may have killed."""
    if -status == signal.SIGPROF:
        return ValueError("it takes too much time: make it simpler")
    if -status == signal.SIGSEGV:
        return ValueError("it nests too deeply: make it simpler")
    if -status == signal.SIGABRT:
        return TooMuchMemory("it takes too much memory: make it simpler")
    return ChildProcessError(f"the checker process ended with status {status}")


def _kill_idle(reference: weakref.ref[GrammarChecker]) -> None:
    checker = reference()
    if checker is not None:
        checker.kill_idle()


def _send(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:  # closing flushes what the process did not read
            pass
