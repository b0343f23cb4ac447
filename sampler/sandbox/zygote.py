"""The zygote: the initialized process that sandboxes are forked from.

It never runs client code itself, and reads nothing but the server's channel.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import select
import signal
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy
import orjson
import torch

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.kernel.lockdown import Lockdown, readable_paths

from .kernel import jail_root, privileges, protections, self_test
from .protocol import FLOAT_BYTES, Answer, Channel, ChannelClosed, ControlMessage, pack
from .warm_up import warm_up
from .worker import Worker, serve

FIRST_CALL = 1
"""Number of a sandbox's first call, which loads its processor."""

_FIRST_UID = 0x7000_0000
_NUM_UIDS = 1 << 16
"""If this process may change its user, each sandbox has its own user id in this range, which systemd lists as unused:
<https://systemd.io/UIDS-GIDS/>."""


@dataclass(frozen=True)
class SandboxSetup:
    """Settings shared by all sandboxes.

    Attributes:
        names: objects that shipped classes may refer to by name, see `load_class`.
        model: the model properties that a processor can read.
        max_rows: rows of the shared memory.
        memory_limit: bytes that a sandbox may allocate on top of the zygote's address space.
    """

    names: Mapping[tuple[str, str], Any]
    model: ModelView
    max_rows: int
    memory_limit: int


class Zygote:
    """Forks sandboxes, and reports their wait statuses to the server.

    Args:
        entered: the namespaces of which this process is the first member.
    """

    def __init__(self, channel: Channel, setup: SandboxSetup, entered: tuple[str, ...]) -> None:
        self._channel = channel
        self._setup = setup
        self._entered = entered
        self._sandboxes: dict[int, int] = {}
        self._drops_uid = False

    def run(self) -> NoReturn:
        """Serve the channel until the server closes it. All sandboxes die with this process."""
        try:
            privileges.die_with_parent(signal.SIGKILL)
            readable = readable_paths()  # before chdir: excludes the server's working directory
            os.chdir("/")  # do not reveal the server's working directory
            jailed = "mount" in self._entered and jail_root.enter(readable)
            self._drops_uid = privileges.can_become(_FIRST_UID, _FIRST_UID)
            found = dataclasses.replace(
                protections.probe(), namespaces=self._entered, jail_root=jailed, uid_drop=self._drops_uid
            )
            self._lockdown = Lockdown(readable, memory_limit=self._setup.memory_limit, jail_root=jailed)
            failures = self._run_self_test() if found.sufficient else []
            self._channel.send(
                ControlMessage.READY, found.to_json(), failures, descriptors=[os.pidfd_open(os.getpid())]
            )
            self._serve()
        except ChannelClosed:
            os._exit(0)
        except Exception:  # noqa: BLE001  # boundary: process death
            traceback.print_exc()
        finally:
            os._exit(1)

    def _serve(self) -> NoReturn:
        child_ended, wakeup = socket.socketpair()
        for end in (child_ended, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(child_ended, select.POLLIN)
        poll.register(self._channel.connection, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == child_ended.fileno():
                    child_ended.recv(4096)
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

    def _fork(self, sandbox: int, connection: int, shared_memory: int) -> None:
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    self._become_sandbox(self._uid(sandbox), connection, shared_memory)
                finally:
                    os._exit(1)
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                raise
        except OSError as error:
            self._channel.send(ControlMessage.NOT_FORKED, sandbox, str(error))
        else:
            self._sandboxes[pid] = sandbox
            self._channel.send(ControlMessage.FORKED, sandbox, descriptors=[pidfd])
            os.close(pidfd)
        os.close(connection)
        os.close(shared_memory)

    def _uid(self, sandbox: int) -> int | None:
        return _FIRST_UID + sandbox % _NUM_UIDS if self._drops_uid else None

    def _become_sandbox(self, uid: int | None, connection: int, shared_memory: int) -> None:
        setup = self._setup
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _reseed()
        memory = mmap.mmap(shared_memory, 0)
        count = setup.max_rows * setup.model.vocab_size
        assert len(memory) >= count * FLOAT_BYTES
        logits = torch.frombuffer(memory, dtype=torch.float32, count=count).view(setup.max_rows, -1)
        try:
            self._lockdown.apply([connection], uid)
        except OSError as error:
            refusal = _refusal(error).encode()
            os.write(connection, pack(Answer.REFUSED, FIRST_CALL, refusal))
            return
        warm_up(logits, setup.model)
        serve(connection, Worker(logits, setup.model, setup.names))

    def _run_self_test(self) -> list[str]:
        """Lock a child down and run the self-test in it. Return the failures."""
        own_end, other_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._lockdown.apply([other_end.fileno()], self._uid(0))
                os.write(other_end.fileno(), orjson.dumps(self_test.run()))
            except OSError as error:
                os.write(other_end.fileno(), orjson.dumps([_refusal(error)]))
            finally:
                os._exit(0)
        other_end.close()
        answer = own_end.makefile("rb").read()
        own_end.close()
        os.waitpid(pid, 0)
        failures: list[str] = orjson.loads(answer) if answer else ["the self-test ended its process"]
        return failures


def _refusal(error: OSError) -> str:
    return f"cannot lock down the sandbox: {error}"


def _reseed() -> None:
    """Reseed the random number generators of a forked process."""
    random.seed()
    numpy.random.seed()
    torch.default_generator.manual_seed(random.getrandbits(64) - (1 << 63))  # `torch.seed` opens a device
