"""The trusted channel between the server, the launcher and the zygote: framed messages with file descriptors."""

from __future__ import annotations

import marshal
import os
import socket
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from .protocol import HEADER

_MAX_DESCRIPTORS = 4


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
