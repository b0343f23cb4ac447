"""The thread that steps the engine, and the inbox through which others reach it.

It also makes the engine. PyTorch's operations on a CPU share their work with threads that belong to the thread that
calls them. With two such teams in a process there are more threads than cores, and those of OpenMP then sleep between
any two operations instead of waiting a moment: a forward pass of a small model takes half as long again. So no other
thread than this one computes on tensors of any size.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from logitship.server.requests.sequence import Sequence

from .engine import Engine
from .freed_memory import give_back_freed_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE = 1.0
"""Seconds without work after which memory is given back: those who ask one thing after the other do not wait for it."""


class EngineThread:
    """Runs what makes an engine, then the engine, until told to stop. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._after_step: Callable[[], None] = _nothing
        self._on_death: Callable[[], None] = _nothing
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="logitship-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the thread, and wait for it.

        Raises:
            Exception: what the function raises.
        """
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                future.set_exception(error)

        self._send(settle)
        return future.result()

    def start(self, engine: Engine, after_step: Callable[[], None], on_death: Callable[[], None]) -> None:
        """Begin to step.

        Args:
            after_step: called on the thread after each step, for what the step gave out.
            on_death: called there if the thread ends by an error of the engine itself.
        """

        def begin() -> None:
            self._engine, self._after_step, self._on_death = engine, after_step, on_death

        self._send(begin)

    def stop(self, timeout: float) -> None:
        """End what runs as aborted, and the thread after its current step.

        Args:
            timeout: longest wait for that, in seconds. In-process code of a client may never return; the thread then
                goes with the process.
        """
        if self._engine is not None:
            self.abort(lambda sequence: True)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self.alive:
            logger.error("the engine's step does not end: a processor in it may never return")

    @property
    def alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    def clear_prefixes(self) -> None:
        """Forget what earlier sequences began with, before the sequences that come after this."""
        self._send(lambda: self._running.clear_prefixes())

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences; the first step that finds free slots takes them."""
        self._send(lambda: self._running.add(sequences))

    def abort(self, wanted: Callable[[Sequence], bool]) -> None:
        """End the sequences that fit before the next step."""
        self._send(lambda: self._running.abort(wanted))

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "`start` comes first"
        return self._engine

    def _send(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            self._on_death()  # first: nobody may wait for a thread that then fails to write its log
            logger.critical("the engine's thread died", exc_info=True)

    def _loop(self) -> None:
        while True:
            self._receive()
            worked = self._engine is not None and self._engine.step()
            self._after_step()
            if not worked and not self._wait():
                return

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self) -> bool:
        """Sleep until something arrives; False if the thread should end."""
        if not self._woken(IDLE):
            give_back_freed_memory()
            self._woken(None)
        return bool(self._inbox) or not self._stopping

    def _woken(self, timeout: float | None) -> bool:
        """Whether something arrives within so many seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._inbox) or self._stopping, timeout)


def _nothing() -> None:
    """Done after a step, and at the end, where there is no engine yet."""
