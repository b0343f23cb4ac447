"""The messages of one call: what is sent to the sandbox, and what it answers; and the thread that waits for answers."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from .cpu_time import CallDeadline
from .protocol import ANSWERS, HEADER, MAX_ANSWER, MAX_PRINTED, Answer, Command, pack

_CHUNK = 4096
"""Bytes of an answer to read at first."""

_ONCE_READABLE = select.EPOLLIN | select.EPOLLONESHOT
"""Events to watch: what has not been received yet is reported once."""


class InvalidAnswer(Exception):
    """A sandbox sent something that is no answer to its call."""


class CallExchange:
    """Sends a message and receives its answer, over a connection that does not block.

    The answer is not trusted: its sender may have been taken over by the processor.

    Args:
        connection: to the sandbox.
        before: bytes to send before the command.
        command: one that has an answer.
        number: of the call, which its answer repeats.
        body: of the command.
        deadline: when the process is killed for giving no answer.

    Attributes:
        received: the answer received so far, without the messages PRINTED before it.
        printed: the text of these messages; the last part of it if it is long.
        deadline: see above.
        closed_at: `time.perf_counter` when the connection was found closed; None while it is open.
    """

    def __init__(
        self,
        connection: socket.socket,
        before: bytes,
        command: Command,
        number: int,
        body: bytes,
        deadline: CallDeadline,
    ) -> None:
        self.deadline = deadline
        self.received = bytearray()
        self.printed = ""
        self.closed_at: float | None = None
        self._connection = connection
        self._number = number
        self._answers = ANSWERS[command]
        self._unsent = memoryview(before + pack(command, number, body))
        self._num_printed = 0
        """Bytes of the messages PRINTED so far."""

    @property
    def is_sent(self) -> bool:
        """True once the whole message was sent."""
        return not self._unsent

    def send(self) -> None:
        """Send as much as possible without blocking."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._connection.send(self._unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return
            except OSError:
                self._set_closed()
                return

    def receive(self) -> None:
        """Receive what has arrived, without blocking."""
        # In chunks, because `recv` allocates the requested size, and most answers are short.
        size = _CHUNK
        while True:
            # Up to one byte more than the longest answer, to detect a longer one.
            rest = HEADER.size + MAX_ANSWER + MAX_PRINTED + 1 - len(self.received)
            try:
                chunk = self._connection.recv(min(rest, size))
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            self.received += chunk
            if not chunk:
                self._set_closed()
            if len(chunk) < size:
                return
            size = rest

    def _set_closed(self) -> None:
        self.closed_at = self.closed_at or time.perf_counter()

    def answer(self) -> tuple[Answer, bytes] | None:
        """Parse the answer. Return None if it is not complete.

        Raises:
            InvalidAnswer: it is none.
        """
        if not self.take_messages_printed():
            return None
        kind, number, size = HEADER.unpack_from(self.received)
        end = HEADER.size + size
        answer = next((each for each in self._answers if each == kind), None)
        if number != self._number or size > MAX_ANSWER or len(self.received) > end or answer is None:
            raise InvalidAnswer
        if len(self.received) < end or not self.is_sent:
            return None
        return answer, bytes(self.received[HEADER.size :])

    def take_messages_printed(self) -> bool:
        """Take the messages PRINTED that were received. Return whether the head of the answer follows.

        Raises:
            InvalidAnswer: they are longer than they may be.
        """
        while len(self.received) >= HEADER.size:
            kind, number, size = HEADER.unpack_from(self.received)
            end = HEADER.size + size
            if kind != Answer.PRINTED or number != self._number:
                return True
            if self._num_printed + end > MAX_PRINTED:
                raise InvalidAnswer
            if len(self.received) < end:
                return False
            text = self.received[HEADER.size : end].decode(errors="replace")
            self.printed = (self.printed + text)[-MAX_PRINTED:]
            self._num_printed += end
            del self.received[:end]
        return False


class AnswerReceiver:
    """Notifies each watched call when data has arrived, on a thread of its own.

    Until the logits exist, the engine's thread is in the forward pass. Receiving the data afterwards would delay the
    step, and would be slow, because the forward pass has evicted code and data from the CPU's caches.

    Guarantees:
    * The function of a call is not called after `release`, and has returned when that returns.
    * No method waits for the function of another call, which may take long to decode.

    Raises:
        RuntimeError: the thread cannot be started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, _WatchedCall] = {}
        self._poll = select.epoll()
        self._end = os.eventfd(0)
        self._poll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._receive, name="logitship-answers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._poll.close()
            os.close(self._end)
            raise

    def watch(self, descriptor: int, on_readable: Callable[[], bool]) -> None:
        """Call a function when the connection of a call is readable or closed, until it returns False.

        Args:
            descriptor: file descriptor of the connection.
            on_readable: receives what has arrived, without blocking. Returns whether more may arrive.
        """
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed by another thread: its owner finds out
            self._poll.register(descriptor, _ONCE_READABLE)
            self._calls[descriptor] = _WatchedCall(on_readable)

    def release(self, descriptor: int) -> None:
        """Watch the call on a connection no longer, if it is watched."""
        with self._lock:
            watched = self._calls.get(descriptor)
            if watched is not None:
                self._drop(descriptor)
        if watched is not None:
            with watched.lock:
                pass  # its function has returned now

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
            for descriptor in ready:
                watched = self._calls.get(descriptor)
                if watched is not None:
                    self._receive_from(descriptor, watched)

    def _receive_from(self, descriptor: int, watched: _WatchedCall) -> None:
        with watched.lock:
            if self._calls.get(descriptor) is not watched:  # released since
                return
            may_have_more = watched.on_readable()
        with self._lock:
            if self._calls.get(descriptor) is watched:
                if may_have_more:
                    with contextlib.suppress(OSError):  # closed by another thread
                        self._poll.modify(descriptor, _ONCE_READABLE)
                else:
                    self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        del self._calls[descriptor]
        with contextlib.suppress(OSError):  # closed by another thread
            self._poll.unregister(descriptor)


class _WatchedCall:
    """The function of a call, and the lock that is held while it runs."""

    def __init__(self, on_readable: Callable[[], bool]) -> None:
        self.on_readable = on_readable
        self.lock = threading.Lock()
