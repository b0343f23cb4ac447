"""The thread that steps the engine, and the inbox through which others reach it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .engine import Engine
from .sequence import Sequence

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine until it is told to stop. Every method may be called from any thread.

    Args:
        after_step: called on the engine's thread after each step, for what the step gave out.
        on_death: called there if the thread ends by an error of the engine itself.
    """

    def __init__(self, engine: Engine, after_step: Callable[[], None], on_death: Callable[[], None]) -> None:
        self._engine = engine
        self._after_step = after_step
        self._on_death = on_death
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="logitship-engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End what runs as aborted, and the thread after its current step.

        Args:
            timeout: longest wait for that, in seconds. In-process code of a client may never return; the thread then
                goes with the process.
        """
        self.abort(lambda sequence: True)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self.alive:
            logger.error("the engine's step does not end: a processor in it may never return")

    @property
    def alive(self) -> bool:
        """False before `start` and once the thread has ended."""
        return self._thread.is_alive()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue sequences; the first step that finds free slots takes them."""
        self._send(lambda: self._engine.add(sequences))

    def abort(self, wanted: Callable[[Sequence], bool]) -> None:
        """End the sequences that fit before the next step."""
        self._send(lambda: self._engine.abort(wanted))

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
            worked = self._engine.step()
            self._after_step()
            if not worked and not self._wait():
                return

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self) -> bool:
        """Sleep until something arrives; False if the thread should end."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._stopping)
            return bool(self._inbox) or not self._stopping
