"""The zygote: a warm process that sandboxes are forked from.

It never runs a client's code itself, and reads nothing but the server's channel.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import select
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy
import orjson
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.kernel.lockdown import Lockdown, readable_paths

from .channel import Channel, ChannelClosed, ControlMessage
from .kernel import jail_root, privileges, protections, self_test
from .protocol import FLOAT_BYTES, Answer, pack
from .warm_up import warm_up
from .worker import Worker, serve

FIRST_CALL = 1
"""Number of a sandbox's first call, which loads its processor."""

_FIRST_UID = 1_819_475_968
_NUM_UIDS = 1 << 16
"""Each sandbox runs as a user of its own, if this process may choose: ids that no user of a system has."""


@dataclass(frozen=True)
class SandboxSetup:
    """What all sandboxes have in common.

    Attributes:
        names: what shipped classes may refer to by name, see `load_class`.
        model: what processors may know of the model.
        max_rows: rows of the shared region.
        memory_limit: bytes that a sandbox may take beyond what it starts with.
    """

    names: Mapping[tuple[str, str], Any]
    model: ModelView
    max_rows: int
    memory_limit: int


class Zygote:
    """Forks sandboxes, and tells the server how they ended.

    Args:
        entered: the namespaces that this process is the first of.
    """

    def __init__(self, channel: Channel, setup: SandboxSetup, entered: tuple[str, ...]) -> None:
        self._channel = channel
        self._setup = setup
        self._entered = entered
        self._sandboxes: dict[int, int] = {}
        self._drops_uid = False

    def run(self) -> NoReturn:
        """Serve the server until it closes the channel. Its end is the end of all sandboxes."""
        try:
            privileges.die_with_parent(signal.SIGKILL)
            readable = readable_paths()  # while the folder that the server runs in is known, which is none of them
            os.chdir("/")  # where the server runs is nobody's business
            jailed = "mount" in self._entered and jail_root.enter(readable)
            self._drops_uid = privileges.can_become(_FIRST_UID, _FIRST_UID)
            found = dataclasses.replace(
                protections.probe(), namespaces=self._entered, jail_root=jailed, uid_drop=self._drops_uid
            )
            self._lockdown = Lockdown(readable, memory_limit=self._setup.memory_limit, jail_root=jailed)
            failures = self._tested() if found.sufficient else []
            self._channel.send(
                ControlMessage.READY, found.to_json(), failures, descriptors=[os.pidfd_open(os.getpid())]
            )
            self._serve()
        except ChannelClosed:
            os._exit(0)
        finally:
            os._exit(1)

    def _serve(self) -> NoReturn:
        ended, tell = socket.socketpair()
        for end in (ended, tell):
            end.setblocking(False)
        signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._channel.connection, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == ended.fileno():
                    ended.recv(4096)
                    self._reap()
                else:
                    note, values, descriptors = self._channel.receive()
                    assert note is ControlMessage.FORK
                    self._fork(*values, *descriptors)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox = self._sandboxes.pop(pid, None)
            if sandbox is not None:
                self._channel.send(ControlMessage.EXITED, sandbox, status)

    def _fork(self, sandbox: int, connection: int, region: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.send(ControlMessage.NOT_FORKED, sandbox, str(error))
        else:
            if pid == 0:
                try:
                    self._become_sandbox(self._uid(sandbox), connection, region)
                finally:
                    os._exit(1)
            self._sandboxes[pid] = sandbox
            pidfd = os.pidfd_open(pid)
            self._channel.send(ControlMessage.FORKED, sandbox, descriptors=[pidfd])
            os.close(pidfd)
        os.close(connection)
        os.close(region)

    def _uid(self, sandbox: int) -> int | None:
        return _FIRST_UID + sandbox % _NUM_UIDS if self._drops_uid else None

    def _become_sandbox(self, uid: int | None, connection: int, region: int) -> None:
        setup = self._setup
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _reseed()
        memory = mmap.mmap(region, 0)
        count = setup.max_rows * setup.model.vocab_size
        assert len(memory) >= count * FLOAT_BYTES
        logits = torch.frombuffer(memory, dtype=torch.float32, count=count).view(setup.max_rows, -1)
        try:
            self._lockdown.apply([connection], uid)
        except OSError as error:
            refusal = f"the sandbox cannot be locked: {error}".encode()
            os.write(connection, pack(Answer.REFUSED, FIRST_CALL, refusal))
            return
        warm_up(logits, setup.model)
        serve(connection, Worker(logits, setup.model, setup.names))

    def _tested(self) -> list[str]:
        """What a locked process can do that it must not."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._lockdown.apply([theirs.fileno()], self._uid(0))
                os.write(theirs.fileno(), orjson.dumps(self_test.run()))
            except OSError as error:
                os.write(theirs.fileno(), orjson.dumps([f"the sandbox cannot be locked: {error}"]))
            finally:
                os._exit(0)
        theirs.close()
        answer = ours.makefile("rb").read()
        ours.close()
        os.waitpid(pid, 0)
        failures: list[str] = orjson.loads(answer) if answer else ["the self-test ended its process"]
        return failures


def _reseed() -> None:
    """Give a forked process random numbers of its own."""
    random.seed()
    numpy.random.seed()
    torch.manual_seed(random.getrandbits(64) - (1 << 63))  # torch.seed() opens a device
