"""Selects the calls that begin before their logits exist, and receives their answers on a thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Protocol

MAX_PAUSE = 64
"""Most calls that are made with their logits before the next one is promised them."""


class ReadHistory:
    """Record of the calls of a processor that used the values of logits that they were promised.

    Such a call costs one exchange of messages more than one that has its logits from the beginning. So after each, a
    number of calls is made with logits, twice as many as the last time, up to `MAX_PAUSE`.

    Attributes:
        never_promise: True if the class cannot be called before its logits exist.
        num_promised: calls that were promised their logits.
        num_read: those of them that used their values.
    """

    def __init__(self) -> None:
        self.never_promise = False
        self.num_promised = self.num_read = 0
        self._pause = 1
        self._left = 0

    def may_promise(self) -> bool:
        """Return whether the next call should be promised its logits. Called once for each call."""
        if self.never_promise:
            return False
        self._left -= 1
        return self._left < 0

    def observe(self, *, was_read: bool) -> None:
        """Record a call that was promised its logits."""
        self.num_promised += 1
        self.num_read += was_read
        if was_read:
            self._left = self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
        else:
            self._left, self._pause = 0, 1


class UnansweredCall(Protocol):
    """A call that an `AnswerReceiver` watches."""

    def on_readable(self) -> None:
        """Receive what has arrived. Never blocks."""
        ...


class AnswerReceiver:
    """Notifies each call that it watches once that data has arrived, on a thread of its own. Its owner does all else.

    Until the logits exist, the engine's thread is in the forward pass. What it did afterwards would delay the step, and
    take long: the forward pass has displaced code and data from the caches.

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
