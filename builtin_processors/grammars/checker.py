"""The server's end of `check`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import wait
from typing import Any

from . import check


class GrammarChecker:
    """Has grammars compiled in a process of its own, one after the other. The process starts with the first one.

    Args:
        tokenizer: the arguments of `check.make_tokenizer`.
        deadline: most seconds for a grammar.
    """

    def __init__(self, tokenizer: dict[str, Any], deadline: float = 5.0) -> None:
        self._tokenizer = tokenizer
        self._deadline = deadline
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def check(self, grammar: str) -> None:
        """Find out whether a grammar can be compiled. Waits while another one is checked.

        Raises:
            ValueError: it cannot be compiled, or not in the time, memory and stack that a grammar may take; says why.
        """
        with self._lock:
            process = self._running()
            try:
                reason = self._ask(process, grammar)
            except (OSError, TimeoutError, EOFError) as error:
                self.close()
                took = "time" if isinstance(error, TimeoutError) else "memory, or nests too deeply"
                raise ValueError(f"it takes too much {took}: make it simpler") from None
        if reason is not None:
            raise ValueError(reason)

    def close(self) -> None:
        """End the process. The next check starts another one."""
        if self._end is not None:
            self._end()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-I", check.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                env={},  # nothing in there is its business, least of all the operator's keys
            )
            self._end = weakref.finalize(self, _end, self._process)
            _send(self._process, self._tokenizer)
        return self._process

    def _ask(self, process: subprocess.Popen[str], grammar: str) -> str | None:
        assert process.stdout is not None
        _send(process, grammar)
        if not wait([process.stdout.fileno()], self._deadline):
            raise TimeoutError
        answer = process.stdout.readline()
        if not answer:
            raise EOFError
        reason: str | None = json.loads(answer)
        return reason


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
        except BrokenPipeError:  # what it did not read any more is written when the pipe is closed
            pass
