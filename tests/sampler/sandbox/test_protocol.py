from __future__ import annotations

import contextlib
import marshal
import os
import random
import socket
import threading
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.sandbox.protocol import (
    HEADER,
    MAX_DEPTH,
    Answer,
    Channel,
    ChannelClosed,
    Command,
    ControlMessage,
    NotPlainError,
    check_plain,
    pack,
)
from tests.helpers.descriptors import no_file_stays_open
from tests.helpers.random_cases import random_seeds


@given(st.sampled_from([*Command, *Answer]), st.integers(0, (1 << 32) - 1), st.binary())
def test_message_has_16_byte_header(kind: Command | Answer, number: int, body: bytes) -> None:
    message = pack(kind, number, body)
    assert HEADER.unpack(message[:16]) == (kind, number, len(body))
    assert message[16:] == body


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


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
    with no_file_stays_open():
        socket.send_fds(ends[0].connection, [message[:length]], [0])
        ends[0].connection.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):
            ends[1].receive()


class Text(str):
    __slots__ = ()


class Number(IntEnum):
    ONE = 1


ATOMS: list[Any] = [None, True, 0, -(1 << 90), 1.5, float("nan"), float("-inf"), 2j, "text", "\ud800", b"bytes"]


@pytest.mark.parametrize("value", [*ATOMS, [], {}, (), set(), frozenset(), {(1, "a"): {frozenset({2})}, None: [()]}])
def test_plain_values_pass(value: Any) -> None:
    check_plain(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        (bytearray(), "bytearray"),
        (memoryview(b""), "memoryview"),
        (range(3), "range"),
        (..., "ellipsis"),
        (len, "builtin_function_or_method"),
        ((lambda: 0).__code__, "code"),
        (int, "type"),
        (Text("a"), r"test_protocol\.Text"),
        (Number.ONE, r"test_protocol\.Number"),
        (OrderedDict(), r"collections\.OrderedDict"),
        (Counter("a"), r"collections\.Counter"),
        (UserDict(), r"collections\.UserDict"),
        (MappingProxyType({}), "mappingproxy"),
        (deque(), r"collections\.deque"),
        (numpy.float64(1), r"numpy\.float64"),
        (numpy.zeros(2), r"numpy\.ndarray"),
        (torch.zeros(2), r"torch\.Tensor"),
    ],
)
def test_other_types_are_refused(value: Any, name: str) -> None:
    wrapped: list[Any] = [value, [value], (1, value), {"a": value}, {"a": [{"b": (None, value)}]}]
    with contextlib.suppress(TypeError):  # unhashable
        wrapped += [{value: 1}, {(value,)}, frozenset({value})]
    for each in wrapped:
        with pytest.raises(NotPlainError, match=f"^holds a value of type .*{name}: a sandbox takes plain values only"):
            check_plain(each)


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: [1, [v], v], lambda v: frozenset({v})]
)
def test_depth_limit(wrap: Callable[[Any], Any]) -> None:
    levels = 2 if isinstance(wrap(1), list) and len(wrap(1)) == 3 else 1
    check_plain(nested(MAX_DEPTH // levels, wrap))
    with pytest.raises(NotPlainError, match=f"deeper than {MAX_DEPTH} levels"):
        check_plain(nested(MAX_DEPTH // levels + 1, wrap))


def test_depth_of_dict_keys_counts() -> None:
    with pytest.raises(NotPlainError, match="deeper"):
        check_plain({nested(MAX_DEPTH, lambda value: (value,)): 1})


def test_self_referential_value_is_refused() -> None:
    own: list[Any] = []
    own.append(own)
    with pytest.raises(NotPlainError, match="deeper"):
        check_plain(own)


def test_shared_containers_are_visited_once() -> None:
    """There are 2^100 paths to the innermost list."""
    check_plain(nested(100, lambda value: [value, value]))


@random_seeds(20)
def test_accepted_values_round_trip_through_marshal(seed: int) -> None:
    rng = random.Random(seed)
    odd: list[Any] = [OrderedDict(), Text("a"), numpy.float32(1), bytearray(b"x")]

    def make(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(odd) if rng.random() < 0.01 else rng.choice([1, 2.5, "a", b"b", True, None, 1j])
        parts = [make(depth - 1) for _ in range(rng.randint(0, 4))]
        kind = rng.choice(["list", "tuple", "dict"])
        return parts if kind == "list" else tuple(parts) if kind == "tuple" else dict(enumerate(parts))

    def holds_odd(value: Any) -> bool:
        if type(value) in (list, tuple, dict):
            return any(holds_odd(each) for each in (value.values() if isinstance(value, dict) else value))
        return any(value is each for each in odd)

    for _ in range(50):
        value = make(5)
        if holds_odd(value):
            with pytest.raises(NotPlainError):
                check_plain(value)
        else:
            check_plain(value)
            assert marshal.loads(marshal.dumps(value)) == value
