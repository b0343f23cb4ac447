"""The protocol between the server and a sandbox, and the channel to the launcher and the zygote.

Each sandbox has a stream socket and shared memory, float32 [max_rows, vocab]. The server copies the rows of a call into
the shared memory, and the sandbox writes its processor's result there. Everything else is sent through the socket, in
messages with a header of 16 bytes.

```
server → sandbox                                            answer
LOAD     the parts of a processor string, its artifacts     LOADED (class description) or REFUSED (reason)
ATTACH   a sequence: parameters, prompt, output so far      none
FORK     a sequence, and the new sequence to copy it to     none
DETACH   a removed sequence                                 none
GROUP    the sequences of the rows, from now on             none
STEP     the new tokens of each row                         DONE, FAULTS, or AGAIN (send the rows again)
RETRY    the rows are in the shared memory again            DONE or FAULTS
PROMISE  as STEP, but the rows are not there yet            EDITS, DONE, FAULTS, or READ (send the rows)
ROWS     the rows are in the shared memory now              DONE, FAULTS or AGAIN
```

What the author's code prints is sent as it is written, in messages PRINTED before the answer to the call.

A processor that is called before its logits exist answers a PROMISE with the edits that it recorded, in the form of
`edit_codec`. If they are longer than `MAX_ANSWER`, they are in the shared memory. A processor that uses the logits'
values waits between READ and ROWS. Commands without an answer that arrive in between are executed after the call.

Assumptions:
* The server does not trust a sandbox: not the length, type or timing of what it sends, nor that our worker sent it.
  Answers are bytes, numbers and JSON of bounded size; nothing is unpickled.
* A sandbox trusts the server, which sends plain values written with `marshal`.

Guarantees:
* A FORK is sent between two STEPs of its sequence, and copies the state after the first.
* At most one call is in flight. An answer has the `number` of its call, and so has PRINTED.
* A sandbox that gives no answer in time gets `DUMP_SIGNAL`, writes the stack of its Python code to the socket, as text,
  and is killed.
* The sandbox may write to the shared memory at any time. The server copies the rows or the edits out, and only uses the
  copy.

The channel between the server, the launcher and the zygote is trusted: framed messages with file descriptors. Plain
values are those that `marshal` can write, and that run no code when they are read back in a sandbox.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from enum import IntEnum
from typing import Any

from logitship.client.serialization.artifact import Artifact, ArtifactBytes, bytes_of
from logitship.client.serialization.processor_string import LineRange, Listing, PickledProcessor, SourceProcessor

HEADER = struct.Struct("<IIQ")
"""Command or answer, number of the call (0 if it has no answer), length of the body."""

MAX_ANSWER = 1 << 16
"""Largest body of an answer, in bytes. The server reads no further, and kills a sandbox that sends more."""

MAX_PRINTED = 1 << 13
"""Most bytes of the messages PRINTED of a call, with their headers. The rest of what it prints is dropped."""

EDITS_HEADER = struct.Struct("<dI")
"""Head of EDITS: the seconds that the call took, as the sandbox says; bytes in the shared memory, 0 if they follow."""

SECONDS = struct.Struct("<d")
"""Body of READ, and of a PROMISE's DONE: the seconds that the call took so far, as the sandbox says."""

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a sandbox write where it is to its socket."""

FLOAT_BYTES = 4
_MAX_DESCRIPTORS = 4
MAX_DEPTH = 200
"""Nesting depth of containers. `marshal` itself stops at some thousand, and readers recurse."""

_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})
_COLLECTIONS = frozenset({frozenset, list, set, tuple})


class Command(IntEnum):
    """A message from the server to a sandbox."""

    LOAD = 1
    ATTACH = 2
    DETACH = 3
    STEP = 4
    RETRY = 5
    FORK = 6
    GROUP = 7
    PROMISE = 8
    ROWS = 9


class Answer(IntEnum):
    """A message from a sandbox to the server."""

    LOADED = 1
    REFUSED = 2
    DONE = 3
    FAULTS = 4
    AGAIN = 5
    READ = 6
    EDITS = 7
    PRINTED = 8


ANSWERS: Mapping[Command, Collection[Answer]] = {
    Command.LOAD: {Answer.LOADED, Answer.REFUSED},
    Command.STEP: {Answer.DONE, Answer.FAULTS, Answer.AGAIN},
    Command.RETRY: {Answer.DONE, Answer.FAULTS},
    Command.PROMISE: {Answer.EDITS, Answer.DONE, Answer.FAULTS, Answer.READ},
    Command.ROWS: {Answer.DONE, Answer.FAULTS, Answer.AGAIN},
}
"""The answers to each command that has any, see the module."""


def pack(message: int, number: int, body: bytes = b"") -> bytes:
    """Return the bytes of a message: header and body."""
    return HEADER.pack(message, number, len(body)) + body


def load_message(string: PickledProcessor | SourceProcessor) -> bytes:
    """Return the body of LOAD for a processor.

    Raises:
        ProcessorLoadError: an artifact that it uses is missing.
    """
    if isinstance(string, SourceProcessor):
        form = ("source", string.source, string.class_name, string.captured, string.python)
        return marshal.dumps((bytes_of(string.artifacts), *form))
    listing = string.listing
    lines = None if listing is None else (listing.text, tuple(map(astuple, listing.ranges)))
    return marshal.dumps((bytes_of(string.artifacts), "pickled", string.payload, string.python, lines))


def shipped_string(body: bytes) -> PickledProcessor | SourceProcessor:
    """Read the body of LOAD."""
    contents, form, *parts = marshal.loads(body)
    artifacts = tuple(Artifact(digest, ArtifactBytes(data)) for digest, data in contents.items())
    if form == "source":
        source, class_name, captured, python = parts
        return SourceProcessor(source, class_name, captured, python, artifacts)
    payload, python, lines = parts
    listing = None if lines is None else Listing(lines[0], tuple(LineRange(*each) for each in lines[1]))
    return PickledProcessor(payload, python, listing=listing, artifacts=artifacts)


class ControlMessage(IntEnum):
    """Type of a message. Each lists its values and, in brackets, its file descriptors."""

    SETUP = 1
    """To the launcher: see `zygote.SandboxSetup`."""
    LOADED = 2
    """From the launcher: everything is imported."""
    START = 3
    """To the launcher: start a zygote [its channel]."""
    READY = 4
    """From a zygote: the protections of its sandboxes, and the failures of its self-test [pidfd of the zygote]."""
    FORK = 5
    """To a zygote: id [connection, shared memory]."""
    FORKED = 6
    """From a zygote: id [pidfd]."""
    NOT_FORKED = 7
    """From a zygote: id, error."""
    EXITED = 8
    """From a zygote: id, wait status."""


class ChannelClosed(Exception):
    """The peer closed the channel, or did not answer in time."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, note: ControlMessage, *values: Any, descriptors: Sequence[int] = ()) -> None:
        """Send plain values. The caller still owns its descriptors.

        Raises:
            ChannelClosed: the peer closed the channel.
        """
        body = marshal.dumps(values)
        header = HEADER.pack(note, 0, len(body))
        try:
            if descriptors:
                socket.send_fds(self.connection, [header], descriptors)
            else:
                self.connection.sendall(header)
            self.connection.sendall(body)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[ControlMessage, tuple[Any, ...], list[int]]:
        """Wait for a message. Return its kind, values and descriptors.

        Raises:
            ChannelClosed: the peer closed the channel, or the socket's timeout expired.
        """
        descriptors: list[int] = []
        try:
            header, descriptors = self._receive_with_descriptors()
            header += self._read(HEADER.size - len(header))
            note, _, size = HEADER.unpack(header)
            return ControlMessage(note), marshal.loads(self._read(size)), descriptors
        except (ChannelClosed, OSError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosed(str(error)) from None

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def _receive_with_descriptors(self) -> tuple[bytes, list[int]]:
        # Not `socket.recv_fds`: it ignores its flags in Python 3.11, so the descriptors would be inheritable.
        ancillary_size = socket.CMSG_LEN(_MAX_DESCRIPTORS * array("i").itemsize)
        data, ancillary, _, _ = self.connection.recvmsg(HEADER.size, ancillary_size, socket.MSG_CMSG_CLOEXEC)
        descriptors = array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content)
        return data, descriptors.tolist()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.connection.recv(size - len(data))
            if not chunk:
                raise ChannelClosed("end of stream")
            data += chunk
        return bytes(data)


class NotPlainError(ValueError):
    """A value is not plain, or is nested too deep. The message is a sentence without its subject."""


def check_plain(value: Any) -> None:
    """Refuse values not made of dict, list, tuple, set, frozenset, str, bytes, int, float, complex, bool and None.

    Subclasses are refused too: `marshal` cannot write an `OrderedDict`, and writes a `numpy.float64` as its bytes.

    Raises:
        NotPlainError: names the type, or the depth.
    """
    # Containers seen, with their greatest depth: a shared container is not traversed again.
    seen: dict[int, int] = {}
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        value, depth = waiting.pop()
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is not dict and kind not in _COLLECTIONS:
            raise NotPlainError(
                f"holds a value of type {_name(kind)}: a sandbox takes plain values only, such as JSON has"
            )
        if depth == MAX_DEPTH:
            raise NotPlainError(f"is nested deeper than {MAX_DEPTH} levels")
        if seen.get(id(value), -1) >= depth:
            continue
        seen[id(value)] = depth
        for held in (value, value.values()) if kind is dict else (value,):
            if not _ATOMS.issuperset(map(type, held)):
                waiting.extend((each, depth + 1) for each in held)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
