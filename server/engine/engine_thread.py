"""The thread that steps the engine, and the inbox through which other threads reach it.

The engine is also built on it. PyTorch's CPU operations share their work with threads that belong to the calling
thread. With two such teams in a process there are more threads than cores, and OpenMP's threads then sleep between
operations instead of spinning for a moment: the forward pass of a small model takes half as long again. So no other
thread computes on tensors of any size. Calls that may never return run in daemon threads of their own.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

IDLE = 1.0
"""Seconds without work after which unused memory is freed, so that a client's next request does not wait for that."""

LONG_IDLE = 20.0
"""Further seconds after which it is freed again: other threads may need longer to finish their work for requests."""

_COLLECTION_INTERVAL = 60.0
"""Seconds of work between two full garbage collections."""

_NEVER = 1 << 30
"""Threshold of a generation that Python itself does not collect."""


class Steppable(Protocol):
    """An engine, as far as its thread needs it."""

    def step(self) -> bool:
        """Compute one step. Return False if there was nothing to do."""
        ...


class EngineThread:
    """Runs functions, and steps an engine once `start` has given it one. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._engine: Steppable = _NoEngine()
        self._after_step: Callable[[], None] = _noop
        self._on_death: Callable[[], None] = _noop
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._collected_at: float | None = None
        """Time of the last full garbage collection; None while Python makes them."""
        self._thread = threading.Thread(target=self._run, name="logitship-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the thread, and wait for its result.

        Raises:
            Exception: what the function raises.
        """
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(function())
            # It is raised where the result is awaited.
            except BaseException as error:  # noqa: BLE001  # boundary: engine thread
                future.set_exception(error)

        self.post(settle)
        return future.result()

    def post(self, command: Callable[[], object]) -> None:
        """Call a function on the thread before the next step, without waiting for it. An exception ends the thread."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def start(self, engine: Steppable, *, after_step: Callable[[], None], on_death: Callable[[], None]) -> None:
        """Start to step an engine.

        Args:
            engine: stepped until the thread ends.
            after_step: called on the thread after each step.
            on_death: called on the thread if an exception ends it.
        """

        def begin() -> None:
            self._engine, self._after_step, self._on_death = engine, after_step, on_death

        self.post(begin)

    def stop(self, timeout: float) -> None:
        """End the thread, after its inbox is empty and the current step is done. Running requests do not finish.

        Args:
            timeout: longest wait for that, in seconds. A client's code in the process may never return; the thread then
                ends with the process. Before the first step, it ends once the model is loaded, which takes long.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        if self.alive and not isinstance(self._engine, _NoEngine):  # else it is still loading the model
            logger.error("the engine's step does not end: a processor in it may never return")

    def take_over_garbage_collection(self) -> None:
        """Make all full garbage collections on this thread, without what exists now. For the end of a start.

        A collection is a pause: it holds the GIL. Half a million objects of libraries and the model take it a quarter
        of a second. Those of large requests take as long, and Python would begin a full collection with nearly each of
        them, because few old objects are left. Here, an idle engine begins one, and a busy one once a minute.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
        self._collected_at = time.monotonic()

    @property
    def alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:  # boundary: engine thread
            self._on_death()  # first: the clients must not wait if writing the log fails
            logger.critical("the engine's thread died", exc_info=True)

    def _loop(self) -> None:
        while self._inbox or not self._stopping:
            self._receive()
            worked = self._engine.step()
            self._after_step()
            if worked:
                self._collect_if_due()
            else:
                self._wait()

    def _collect_if_due(self) -> None:
        now = time.monotonic()
        if self._collected_at is not None and now - self._collected_at >= _COLLECTION_INTERVAL:
            gc.collect()
            self._collected_at = now

    def _receive(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _wait(self) -> None:
        """Sleep until something arrives, or the thread should end."""
        for timeout in (IDLE, LONG_IDLE):
            if self._woken(timeout):
                break
            free_unused_memory()
            if self._collected_at is not None:
                self._collected_at = time.monotonic()
        else:
            self._woken(None)

    def _woken(self, timeout: float | None) -> bool:
        """Return whether something arrives within `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._inbox) or self._stopping, timeout)


def free_unused_memory() -> None:
    """Free objects that only refer to each other, and return freed pages to the system.

    Exceptions with their tracebacks often are such objects. Python looks for the old ones only after many new ones, so
    that they may hold a large request for hours.
    """
    gc.collect()
    trim_freed_memory()


def trim_freed_memory() -> bool:
    """Return freed pages to the system. Takes some milliseconds, without the GIL.

    C's allocator keeps freed memory for reuse. Steps allocate blocks of all sizes, up to the logits of a whole prompt,
    and what lies between two blocks in use is kept as well: a third of the allocator's memory after some thousand
    requests to a tiny model, and more whenever requests happen to need larger holes than there are.

    Returns:
        False where the allocator cannot: `malloc_trim` is glibc's.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    malloc_trim.argtypes = (ctypes.c_size_t,)
    malloc_trim(0)
    return True


class _NoEngine:
    def step(self) -> bool:
        return False


def _noop() -> None:
    pass
