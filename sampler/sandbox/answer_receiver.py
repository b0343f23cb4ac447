"""Receives the answers of calls that began before their logits exist, on a thread of its own.

Until the logits exist, the engine's thread is in the forward pass. What it did afterwards would delay the step, and
take long: the forward pass has displaced code and data from the caches.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Protocol


class UnansweredCall(Protocol):
    """A call that an `AnswerReceiver` watches."""

    def on_readable(self) -> None:
        """Receive what has arrived. Never blocks."""
        ...


class AnswerReceiver:
    """Tells each call that it watches once that something has arrived. Its owner does all else.

    Guarantees:
    * `on_readable` is not called after `release`, and has returned when that returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, UnansweredCall] = {}
        self._poll = select.epoll()
        self._end = os.eventfd(0)
        self._poll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._receive, name="logitship-answers", daemon=True)
        self._thread.start()

    def watch(self, descriptor: int, call: UnansweredCall) -> None:
        """Call `on_readable` once the connection of a call is readable or closed."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed by another thread: its owner finds out
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
            self._calls[descriptor] = call

    def release(self, descriptor: int) -> None:
        """Watch the call on a connection no longer, if it is watched."""
        with self._lock:
            if self._calls.pop(descriptor, None) is not None:
                self._unregister(descriptor)

    def close(self) -> None:
        """End the thread. Calls that are still watched belong to their owners again."""
        if not self._poll.closed:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            self._calls.clear()
            self._poll.close()
            os.close(self._end)

    def _receive(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._end in ready:
                return
            with self._lock:
                for descriptor in ready:
                    call = self._calls.pop(descriptor, None)
                    if call is not None:
                        self._unregister(descriptor)
                        call.on_readable()

    def _unregister(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # closed by another thread
            self._poll.unregister(descriptor)
