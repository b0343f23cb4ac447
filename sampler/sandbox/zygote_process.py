"""The server's side of the launcher and of the zygote: starts them, starts them again, asks for sandboxes."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.kernel.protections import Protections

from .channel import Channel, ChannelClosed, ControlMessage

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds that the launcher gets to import torch, on a machine that does much else."""
FORK_TIMEOUT = 20.0
"""Seconds that a zygote gets to fork. One that takes longer is killed, and the next one asked."""
END_TIMEOUT = 5.0
"""Seconds that the processes get to end by themselves. They need milliseconds."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from logitship.sampler.sandbox.launcher import main; main(int(sys.argv[1]))"
)
_MARK = "LOGITSHIP_LAUNCHER"
"""Tells the launcher's process, by its environment."""
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""All of the server's environment that the launcher gets: the rest may hold secrets."""
_VARIABLES = {
    _MARK: "1",
    # One thread: a process with threads can neither be forked safely nor enter namespaces, and a sandbox has no more.
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


class ZygoteError(Exception):
    """No zygote can be started; the message is for the operator."""


@dataclass(frozen=True)
class ForkedProcess:
    """A sandbox's process.

    Attributes:
        pidfd: refers to it, whatever becomes of its number. The owner closes it.
        status: its wait status once it has ended; None if nobody can tell, because the zygote ended too.
    """

    pidfd: int
    status: Future[int | None]

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@dataclass
class _RunningZygote:
    """A zygote that runs.

    Attributes:
        pidfd: refers to its process.
        forks: by id, those that were asked for.
        statuses: by id, of those that run.
    """

    channel: Channel
    pidfd: int
    protections: Protections
    forks: dict[int, Future[int]] = field(default_factory=dict)
    statuses: dict[int, Future[int | None]] = field(default_factory=dict)
    alive: bool = True


class ZygoteProcess:
    """Keeps a zygote running. Safe to use from several threads.

    `start` begins to import what sandboxes need, which takes seconds, and returns at once; `set_up` says the rest.

    Args:
        names: where the table is of what shipped classes may refer to by name: `module:attribute`.
        max_rows: rows of a sandbox's region.
        memory_limit: bytes that a sandbox may take beyond what it starts with.
    """

    def __init__(self, *, names: str, max_rows: int, memory_limit: int) -> None:
        self._names = names
        self._max_rows = max_rows
        self._memory_limit = memory_limit
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._setup: tuple[object, ...] | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._launcher_channel: Channel | None = None
        self._zygote: _RunningZygote | None = None
        self._readers: list[threading.Thread] = []
        self._closed = False

    def start(self) -> None:
        """Start the launcher.

        Raises:
            ZygoteError: this process is one.
        """
        if _MARK in os.environ:
            # It ran this program instead of a module that it imports. Each launcher would start the next one.
            raise ZygoteError(
                "a file beside this program has the name of a module that Python or torch imports, and was imported "
                "in its place: rename it"
            )
        with self._lock:
            self._start_launcher()

    def set_up(self, model: ModelView) -> Protections:
        """Say what sandboxes are to know of the model, and start a zygote.

        Returns:
            What protects the sandboxes.

        Raises:
            ZygoteError: it does not start, or the kernel does not protect enough.
        """
        try:
            tokenizer = pickle.dumps(model.tokenizer)
        except Exception as error:  # a tokenizer is anybody's class
            raise ZygoteError(f"the model's tokenizer cannot be given to sandboxes: {error}") from error
        eos_token_ids = tuple(sorted(model.eos_token_ids))
        with self._lock:
            self._setup = (self._names, tokenizer, eos_token_ids, model.vocab_size, self._max_rows, self._memory_limit)
            assert self._launcher_channel is not None
            with contextlib.suppress(ChannelClosed):  # then there will be a new one, which is told
                self._launcher_channel.send(ControlMessage.SETUP, *self._setup)
            return self._living_zygote().protections

    def fork(self, connection: int, region: int) -> ForkedProcess:
        """A new sandbox.

        Args:
            connection: descriptor of its end of the connection.
            region: descriptor of its region.

        Raises:
            ZygoteError: there is no zygote, and none can be started.
        """
        for _ in range(3):  # a zygote may end at any time: there will be another
            with self._lock:
                zygote = self._living_zygote()
                sandbox = next(self._ids)
                forked: Future[int] = Future()
                status: Future[int | None] = Future()
                zygote.forks[sandbox], zygote.statuses[sandbox] = forked, status
                with contextlib.suppress(ChannelClosed):  # the thread that reads notices it too
                    zygote.channel.send(ControlMessage.FORK, sandbox, descriptors=[connection, region])
            try:
                return ForkedProcess(forked.result(FORK_TIMEOUT), status)
            except ChannelClosed:
                continue
            except FutureTimeout:
                if zygote.forks.pop(sandbox, None) is None:  # it was done at the last moment
                    return ForkedProcess(forked.result(), status)
                self._give_up(zygote)
        raise ZygoteError("the process that sandboxes are forked from ends again and again")

    def close(self) -> None:
        """End the zygote, with it all sandboxes, and the launcher. Harmless a second time."""
        self._closed = True
        if self._launcher_channel is not None:
            _hang_up(self._launcher_channel)  # before the lock: nobody who holds it waits for the launcher any longer
        with self._lock:
            if self._zygote is not None:
                _hang_up(self._zygote.channel)
            self._end_launcher()
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.join()

    def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair()
        self._launcher = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), json.dumps([path for path in sys.path if path])],
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _VARIABLES,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which then ends in order
        )
        theirs.close()
        self._launcher_channel = Channel(ours)
        if self._setup is not None:
            self._launcher_channel.send(ControlMessage.SETUP, *self._setup)

    def _living_zygote(self) -> _RunningZygote:
        """The zygote; another one if it died. The lock is held."""
        if self._closed:
            raise ZygoteError("the server is shutting down")
        if self._zygote is None or not self._zygote.alive:
            try:
                self._zygote = self._started()
            except ChannelClosed:  # the launcher died
                self._zygote = self._started_anew()
        return self._zygote

    def _started_anew(self) -> _RunningZygote:
        self._end_launcher()
        if self._closed:
            raise ZygoteError("the server is shutting down")
        try:
            self._start_launcher()
            return self._started()
        except (ChannelClosed, OSError) as error:
            raise ZygoteError(
                f"the process that sandboxes are forked from does not start ({error}); what it wrote to the standard "
                "error output says why"
            ) from None

    def _end_launcher(self) -> None:
        if self._launcher is None or self._launcher_channel is None:
            return
        _hang_up(self._launcher_channel)
        self._launcher_channel.close()
        try:
            self._launcher.wait(END_TIMEOUT)  # for the last of its zygotes, too
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def _started(self) -> _RunningZygote:
        assert self._launcher_channel is not None
        ours, theirs = socket.socketpair()
        ours.settimeout(START_TIMEOUT)
        channel = Channel(ours)
        try:
            with theirs:
                self._launcher_channel.send(ControlMessage.START, descriptors=[theirs.fileno()])
            note, (found, failures), (pidfd,) = channel.receive()
        except ChannelClosed:
            channel.close()
            raise
        assert note is ControlMessage.READY
        protections = Protections.from_json(found)
        if not protections.sufficient or failures:
            channel.close()
            os.close(pidfd)
            raise ZygoteError(_insufficient(protections, failures))
        ours.settimeout(None)
        zygote = _RunningZygote(channel, pidfd, protections)
        reader = threading.Thread(target=self._read, args=(zygote,), name="logitship-zygote", daemon=True)
        self._readers = [reader, *(other for other in self._readers if other.is_alive())]
        reader.start()
        return zygote

    def _give_up(self, zygote: _RunningZygote) -> None:
        """Have another one started, because this one does not answer."""
        with self._lock:
            zygote.alive = False
            _hang_up(zygote.channel)

    def _read(self, zygote: _RunningZygote) -> None:
        """Take what a zygote says, until it ends."""
        try:
            while True:
                note, (sandbox, *values), descriptors = zygote.channel.receive()
                if note is ControlMessage.EXITED:
                    zygote.statuses.pop(sandbox).set_result(values[0])
                    continue
                fork = zygote.forks.pop(sandbox, None)
                if fork is None:  # nobody waits for it any more
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif note is ControlMessage.FORKED:
                    fork.set_result(descriptors[0])
                else:
                    fork.set_exception(ZygoteError(f"the kernel gives no process: {values[0]}"))
        except ChannelClosed as closed:
            with self._lock:  # whoever asks for a fork sees either that it is dead, or this
                zygote.alive = False
            for fork in list(zygote.forks.values()):
                fork.set_exception(closed)
            for status in zygote.statuses.values():
                status.set_result(None)
            zygote.channel.close()
            _end(zygote.pidfd)


def _insufficient(protections: Protections, failures: list[str]) -> str:
    if not protections.sufficient:
        return f"this kernel cannot lock shipped code in: {protections.missing()}"
    return (
        f"a locked process could do what it must not: {', '.join(failures)}. Please report this, with: "
        f"{protections.describe()}"
    )


def _end(pidfd: int) -> None:
    """See to the end of a zygote whose channel is closed. With it, its sandboxes have ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(END_TIMEOUT * 1e3):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll()
    os.close(pidfd)


def _hang_up(channel: Channel) -> None:
    with contextlib.suppress(OSError):
        channel.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which `close` alone does not
