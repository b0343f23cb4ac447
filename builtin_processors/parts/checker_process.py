"""A process that checks what clients sent, and that is killed when a check takes too long."""

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

_log = logging.getLogger(__name__)


class TooMuchMemory(ValueError):
    """An allocation failed: the check needs too much memory, or the machine has none left."""


class CheckerProcess:
    """Runs a script that makes checks, one after the other. Thread-safe.

    The process starts with the first check, and again with the first one after it has ended. Each line of its stdin
    and stdout is a JSON value. The first line has the CPU seconds of a check and `setup`, and is answered by null when
    the process is ready. Each further line is a check; the script lets SIGPROF kill it when one takes longer.

    Args:
        script: path of the script.
        setup: what it needs before the first check.
        subject: what it checks, for messages, such as "the grammar".
        cpu_limit: maximum CPU seconds per check.
        timeout: maximum seconds to wait for the process to start, and for its answer.
        idle_timeout: seconds without a check after which the process is ended.

    Attributes:
        was_killed: True if the last check was not answered.
    """

    def __init__(
        self,
        script: str,
        setup: object,
        subject: str,
        cpu_limit: float = 5.0,
        timeout: float = 60.0,
        idle_timeout: float = 30.0,
    ) -> None:
        self._script = script
        self._setup = setup
        self._subject = subject
        self._cpu_limit = cpu_limit
        self._timeout = timeout
        self._idle_timeout = idle_timeout
        self.was_killed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._timer: threading.Timer | None = None
        self._cancel_timer: weakref.finalize[Any, Any] | None = None

    def ask(self, question: str) -> Any:
        """Make a check. Blocks.

        Args:
            question: JSON, on one line.

        Returns:
            The script's answer.

        Raises:
            ValueError: the check exceeds the limits of time, memory or stack; says which.
            TooMuchMemory: it may succeed on a machine with more memory.
            PreparationUnavailable: nothing was checked, because the process does not start or was killed, or the
                machine is too busy.
        """
        with self._lock:
            self._stop_timer()
            try:
                return self._ask(question)
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

    def _ask(self, question: str) -> Any:
        self.was_killed = False
        try:
            process = self._running()
            self.was_killed = True  # unless it answers
            _send(process, question)
            answer = self._answer(process)
            if not answer.endswith("\n"):
                self._kill()
                raise _reason_of_end(process.returncode)
        except OSError as error:  # TimeoutError among them
            self._kill()
            _log.warning("%s cannot be checked: %r", self._subject, error)
            raise PreparationUnavailable(f"the server is too busy to check {self._subject}: try again later") from None
        self.was_killed = False
        return json.loads(answer)

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
        self._timer = None  # first: once it is cancelled, its thread may end
        if self._cancel_timer is not None:
            self._cancel_timer()

    def _running(self) -> subprocess.Popen[str]:
        """Return the process; start it if necessary."""
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._process = subprocess.Popen(
                [sys.executable, "-I", self._script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={},  # it needs nothing of it, and must not get the operator's keys
            )
            self._end = weakref.finalize(self, _end, self._process)
            _send(self._process, json.dumps((self._cpu_limit, self._setup)))
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


def _kill_idle(reference: weakref.ref[CheckerProcess]) -> None:
    checker = reference()
    if checker is not None:
        checker.kill_idle()


def _send(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
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
