from __future__ import annotations

import marshal
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from logitship.sampler.sandbox.channel import Channel, ChannelClosed, ControlMessage
from logitship.sampler.sandbox.protocol import HEADER


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_values_round_trip(ends: tuple[Channel, Channel]) -> None:
    values = ("text", 1.5, (1, 2), b"bytes", None)
    ends[0].send(ControlMessage.SETUP, *values)
    ends[0].send(ControlMessage.START)
    assert ends[1].receive() == (ControlMessage.SETUP, values, [])
    assert ends[1].receive() == (ControlMessage.START, (), [])


def test_descriptors_are_duplicated(ends: tuple[Channel, Channel]) -> None:
    reading, writing = os.pipe()
    ends[0].send(ControlMessage.FORK, 7, descriptors=[writing])
    os.close(writing)
    note, values, (arrived,) = ends[1].receive()
    assert (note, values) == (ControlMessage.FORK, (7,))
    assert not os.get_inheritable(arrived)
    os.write(arrived, b"through the channel")
    os.close(arrived)
    assert os.read(reading, 100) == b"through the channel"
    os.close(reading)


def test_message_larger_than_socket_buffer(ends: tuple[Channel, Channel]) -> None:
    tokenizer = os.urandom(4 << 20)
    sender = threading.Thread(target=ends[0].send, args=(ControlMessage.SETUP, tokenizer))
    sender.start()
    assert ends[1].receive()[1] == (tokenizer,)
    sender.join()


def test_closed_peer(ends: tuple[Channel, Channel]) -> None:
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[1].receive()
    with pytest.raises(ChannelClosed):
        ends[1].send(ControlMessage.FORK, 1)


def test_receive_timeout(ends: tuple[Channel, Channel]) -> None:
    ends[1].connection.settimeout(0.01)
    with pytest.raises(ChannelClosed, match="timed out"):
        ends[1].receive()


@pytest.mark.parametrize("length", [1, HEADER.size, HEADER.size + 3])
def test_truncated_message_leaks_no_descriptor(ends: tuple[Channel, Channel], length: int) -> None:
    body = marshal.dumps((7,))
    message = HEADER.pack(ControlMessage.FORKED, 0, len(body)) + body
    before = open_descriptors()
    socket.send_fds(ends[0].connection, [message[:length]], [0])
    ends[0].connection.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed):
        ends[1].receive()
    assert open_descriptors() == before
