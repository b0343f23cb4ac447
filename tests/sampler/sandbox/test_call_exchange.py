from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from logitship.sampler.sandbox.call_exchange import AnswerReceiver

LONG = 60.0


class Call:
    """A call on a connection of its own, which reads what arrives.

    Args:
        then: is called after each message.
        num_messages: number of messages, after which it has ended.
    """

    def __init__(self, then: Callable[[], object] = lambda: None, num_messages: int = 1) -> None:
        self.num_messages = num_messages
        self.connection, self.sandbox = socket.socketpair()
        self.is_told = threading.Event()
        self.read: list[bytes] = []
        self._then = then

    @property
    def descriptor(self) -> int:
        return self.connection.fileno()

    def on_readable(self) -> bool:
        self.read.append(self.connection.recv(100))
        self.is_told.set()
        self._then()
        return len(self.read) < self.num_messages

    def close(self) -> None:
        self.connection.close()
        self.sandbox.close()


@pytest.fixture
def receiver() -> Iterator[AnswerReceiver]:
    receiver = AnswerReceiver()
    yield receiver
    receiver.close()


@pytest.fixture
def new_call() -> Iterator[Callable[..., Call]]:
    calls: list[Call] = []

    def new_call(then: Callable[[], object] = lambda: None, num_messages: int = 1) -> Call:
        calls.append(Call(then, num_messages))
        return calls[-1]

    yield new_call
    for call in calls:
        call.close()


def test_each_call_is_told_once(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    one, other = new_call(), new_call()
    for call in (one, other):
        receiver.watch(call.descriptor, call.on_readable)
    other.sandbox.send(b"other")
    assert other.is_told.wait(LONG)
    assert not one.is_told.is_set()
    other.sandbox.send(b"more")  # of a later call
    one.sandbox.send(b"one")
    assert one.is_told.wait(LONG)
    assert (one.read, other.read) == ([b"one"], [b"other"])


def test_call_is_told_until_it_has_ended(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    call, other = new_call(num_messages=3), new_call()
    receiver.watch(call.descriptor, call.on_readable)
    for number in range(3):
        call.is_told.clear()
        call.sandbox.send(b"%d" % number)
        assert call.is_told.wait(LONG)
    call.sandbox.send(b"of a later call")
    receiver.watch(other.descriptor, other.on_readable)
    other.sandbox.send(b"other")
    assert other.is_told.wait(LONG)
    assert call.read == [b"0", b"1", b"2"]


def test_call_may_be_watched_again(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    call = new_call()
    for number in range(3):
        call.is_told.clear()
        receiver.watch(call.descriptor, call.on_readable)
        call.sandbox.send(b"%d" % number)
        assert call.is_told.wait(LONG)
        receiver.release(call.descriptor)
    assert call.read == [b"0", b"1", b"2"]


def test_closed_connection_is_readable(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    call = new_call()
    receiver.watch(call.descriptor, call.on_readable)
    call.sandbox.close()
    assert call.is_told.wait(LONG)
    assert call.read == [b""]


def test_released_call_is_not_told(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    released, watched = new_call(), new_call()
    for call in (released, watched):
        receiver.watch(call.descriptor, call.on_readable)
    receiver.release(released.descriptor)
    receiver.release(released.descriptor)  # nothing happens
    released.sandbox.send(b"answer")
    watched.sandbox.send(b"answer")
    assert watched.is_told.wait(LONG)
    assert released.read == []


def test_release_waits_while_the_call_is_told(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    may_return, order = threading.Event(), []

    def then() -> None:
        assert may_return.wait(LONG)
        order.append("told")

    def release() -> None:
        is_releasing.set()
        receiver.release(call.descriptor)
        order.append("released")

    call, is_releasing = new_call(then), threading.Event()
    receiver.watch(call.descriptor, call.on_readable)
    call.sandbox.send(b"answer")
    assert call.is_told.wait(LONG)
    thread = threading.Thread(target=release)
    thread.start()
    assert is_releasing.wait(LONG)
    may_return.set()
    thread.join()
    assert order == ["told", "released"]


def test_connections_that_were_closed_here(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    """`Sandbox.close` may be called on another thread at any time. The descriptor may then be in use again."""
    closed, watched = new_call(), new_call()
    descriptor = closed.descriptor
    receiver.watch(descriptor, closed.on_readable)
    closed.connection.close()
    reused = os.dup(watched.descriptor)
    assert reused == descriptor
    receiver.release(descriptor)
    os.close(reused)
    receiver.watch(descriptor, closed.on_readable)  # nothing happens
    receiver.watch(closed.descriptor, closed.on_readable)
    receiver.watch(watched.descriptor, watched.on_readable)
    watched.sandbox.send(b"answer")
    assert watched.is_told.wait(LONG)
    assert (closed.read, watched.read) == ([], [b"answer"])


def test_close_ends_the_thread(new_call: Callable[..., Call]) -> None:
    before = set(threading.enumerate())
    receiver, call = AnswerReceiver(), new_call()
    (thread,) = set(threading.enumerate()) - before
    receiver.watch(call.descriptor, call.on_readable)
    receiver.close()
    receiver.close()
    assert not thread.is_alive()
    call.sandbox.send(b"answer")
    receiver.release(call.descriptor)
    receiver.watch(call.descriptor, call.on_readable)
    assert call.read == []


def test_nothing_waits_while_another_call_is_told(receiver: AnswerReceiver, new_call: Callable[..., Call]) -> None:
    """It may take long to decode an answer."""
    may_return = threading.Event()
    slow, other = new_call(lambda: may_return.wait(LONG)), new_call()
    receiver.watch(slow.descriptor, slow.on_readable)
    slow.sandbox.send(b"answer")
    assert slow.is_told.wait(LONG)

    def use() -> None:
        receiver.watch(other.descriptor, other.on_readable)
        receiver.release(other.descriptor)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(LONG)
    has_returned = not thread.is_alive()
    may_return.set()
    thread.join()
    assert has_returned
