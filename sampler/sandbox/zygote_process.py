"""The server's side of the launcher and the zygote: starts and restarts them, and requests sandboxes."""

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
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.kernel.protections import Protections

from .cpu_time import move_to_background
from .protocol import Channel, ChannelClosed, ControlMessage

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds for the launcher to import torch, on a busy machine."""
FORK_TIMEOUT = 20.0
"""Seconds for a zygote to fork. After that, it is killed and replaced."""
END_TIMEOUT = 5.0
"""Seconds for the processes to exit by themselves, which takes milliseconds."""

# The garbage collector is off until the launcher has its setup: what it imports stays.
_BOOT = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[2]); "
    "from logitship.sampler.sandbox.launcher import main; main(int(sys.argv[1]))"
)
_MARK = "LOGITSHIP_LAUNCHER"
"""Environment variable that marks the launcher's process."""
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables that the launcher inherits. The rest may hold secrets."""
_VARIABLES = {
    _MARK: "1",
    # One thread: a multithreaded process can neither fork safely nor enter namespaces, and a sandbox may have one only.
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}

_NO_DESCRIPTOR = "this process has no file descriptor left"


class ZygoteError(Exception):
    """The zygote cannot be started. The message is for the operator."""


@dataclass(frozen=True)
class ForkedProcess:
    """A sandbox's process.

    Attributes:
        pidfd: refers to it even after its PID is reused. The owner closes it.
        status: its wait status once it has ended; None if unknown, because the zygote ended too.
    """

    pidfd: int
    status: Future[int | None]

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


@dataclass
class _RunningZygote:
    """A running zygote.

    Attributes:
        pidfd: refers to its process.
        forks: the pidfds of requested sandboxes, by id.
        statuses: the wait statuses of running sandboxes, by id.
    """

    channel: Channel
    pidfd: int
    protections: Protections
    forks: dict[int, Future[int]] = field(default_factory=dict)
    statuses: dict[int, Future[int | None]] = field(default_factory=dict)
    alive: bool = True


class ZygoteProcess:
    """Keeps a zygote running. Thread-safe.

    `start` launches the imports that sandboxes need, which take seconds, and returns at once. `set_up` waits for them.

    Args:
        names: location (`module:attribute`) of the table of objects that shipped classes may refer to by name.
        max_rows: rows of a sandbox's shared memory.
        memory_limit: bytes that a sandbox may allocate on top of the zygote's address space.
        background_cores: fork, which takes ten milliseconds, and start sandboxes on these cores at the priority of
            `LOADING_NICE`: no step waits for them. None: not in the background.
    """

    def __init__(
        self, *, names: str, max_rows: int, memory_limit: int, background_cores: Collection[int] | None = None
    ) -> None:
        self._background_cores = background_cores
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

    @property
    def in_background(self) -> bool:
        """True if sandboxes start in the background, at a low priority; see `Sandbox.leave_background`."""
        return self._background_cores is not None

    def start(self) -> None:
        """Start the launcher.

        Raises:
            ZygoteError: this process is a launcher.
        """
        if _MARK in os.environ:
            # The launcher imported this program in place of another module. Each launcher would start the next one.
            raise ZygoteError(
                "a file next to this program has the name of a module that Python or torch imports, and was imported "
                "instead of it: rename the file"
            )
        with self._lock:
            self._start_launcher()

    def set_up(self, model: ModelView) -> Protections:
        """Start a zygote for this model.

        Returns:
            The protections of the sandboxes.

        Raises:
            ZygoteError: the zygote does not start, or the kernel lacks required protections.
        """
        try:
            tokenizer = pickle.dumps(model.tokenizer)
        # A tokenizer may be of any class, with its own `__reduce__`.
        except Exception as error:  # boundary: third-party code
            raise ZygoteError(f"the model's tokenizer cannot be pickled for sandboxes: {error}") from error
        eos_token_ids = tuple(sorted(model.eos_token_ids))
        with self._lock:
            self._setup = (self._names, tokenizer, eos_token_ids, model.vocab_size, self._max_rows, self._memory_limit)
            assert self._launcher_channel is not None
            with contextlib.suppress(ChannelClosed):  # then a new launcher is started, which gets it
                self._launcher_channel.send(ControlMessage.SETUP, *self._setup)
            return self._live_zygote().protections

    @property
    def alive(self) -> bool:
        """Return whether the zygote runs. Needs no lock."""
        zygote = self._zygote
        return zygote is not None and zygote.alive

    def revive(self) -> None:
        """Start another zygote if this one died. Blocks; the next `fork` raises what fails here."""
        with self._lock, contextlib.suppress(ZygoteError):
            self._live_zygote()

    def fork(self, connection: int, shared_memory: int) -> ForkedProcess:
        """Fork a sandbox.

        Args:
            connection: descriptor of the sandbox's end of the connection.
            shared_memory: descriptor of its shared memory.

        Raises:
            ZygoteError: no zygote can be started.
        """
        for _ in range(3):  # a zygote may die at any time, and is replaced
            with self._lock:
                zygote = self._live_zygote()
                sandbox = next(self._ids)
                forked: Future[int] = Future()
                status: Future[int | None] = Future()
                zygote.forks[sandbox], zygote.statuses[sandbox] = forked, status
                with contextlib.suppress(ChannelClosed):  # the reader thread handles it
                    zygote.channel.send(ControlMessage.FORK, sandbox, descriptors=[connection, shared_memory])
            try:
                error = forked.exception(FORK_TIMEOUT)
            except FutureTimeout:
                if zygote.forks.pop(sandbox, None) is not None:
                    self._abandon(zygote)
                    continue
                error = forked.exception()  # it arrived at the last moment
            if error is None:
                return ForkedProcess(forked.result(), status)
            if not isinstance(error, ChannelClosed):
                raise ZygoteError(str(error))  # a new one, see `_read`
        raise ZygoteError("the process that sandboxes are forked from keeps crashing")

    def close(self) -> None:
        """Terminate the launcher, the zygote and all sandboxes. Idempotent."""
        self._closed = True
        if self._launcher_channel is not None:
            _hang_up(self._launcher_channel)  # before taking the lock: its holder may be waiting for the launcher
        with self._lock:
            if self._zygote is not None:
                _hang_up(self._zygote.channel)
            self._end_launcher()
            readers, self._readers = self._readers, []
        for reader in readers:
            reader.join()

    def _start_launcher(self) -> None:
        own_end, other_end = socket.socketpair()
        self._launcher = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                _BOOT,
                str(other_end.fileno()),
                json.dumps([path for path in sys.path if path]),
            ],
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _VARIABLES,
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C must only reach the server, which then shuts down in order
        )
        other_end.close()
        self._launcher_channel = Channel(own_end)
        if self._setup is not None:
            self._launcher_channel.send(ControlMessage.SETUP, *self._setup)

    def _live_zygote(self) -> _RunningZygote:
        """Return the zygote; start another one if it died. The caller holds the lock."""
        if self._closed:
            raise ZygoteError("the server is shutting down")
        if self._zygote is None or not self._zygote.alive:
            try:
                self._zygote = self._start_zygote()
            except ChannelClosed:  # the launcher died
                self._zygote = self._restart()
        return self._zygote

    def _restart(self) -> _RunningZygote:
        self._end_launcher()
        if self._closed:
            raise ZygoteError("the server is shutting down")
        try:
            self._start_launcher()
            return self._start_zygote()
        except (ChannelClosed, OSError) as error:
            raise ZygoteError(
                f"the process that sandboxes are forked from does not start ({error}): see the errors that it wrote to "
                "the standard error output"
            ) from None

    def _end_launcher(self) -> None:
        if self._launcher is None or self._launcher_channel is None:
            return
        _hang_up(self._launcher_channel)
        self._launcher_channel.close()
        try:
            self._launcher.wait(END_TIMEOUT)  # it waits for its last zygote
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def _start_zygote(self) -> _RunningZygote:
        assert self._launcher_channel is not None
        own_end, other_end = socket.socketpair()
        own_end.settimeout(START_TIMEOUT)
        channel = Channel(own_end)
        try:
            with other_end:
                self._launcher_channel.send(ControlMessage.START, descriptors=[other_end.fileno()])
            note, (found, failures), descriptors = channel.receive()
            if not descriptors:
                raise ChannelClosed(_NO_DESCRIPTOR)
        except ChannelClosed:
            channel.close()
            raise
        pidfd = descriptors[0]
        assert note is ControlMessage.READY
        protections = Protections.from_json(found)
        if not protections.sufficient or failures:
            channel.close()
            os.close(pidfd)
            raise ZygoteError(_refusal(protections, failures))
        own_end.settimeout(None)
        if self._background_cores is not None:
            move_to_background(pid_of(pidfd), self._background_cores)
        zygote = _RunningZygote(channel, pidfd, protections)
        reader = threading.Thread(target=self._read, args=(zygote,), name="logitship-zygote", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            channel.close()
            os.close(pidfd)
            raise ZygoteError(f"no thread can be started for its messages: {error}") from None
        self._readers = [reader, *(other for other in self._readers if other.is_alive())]
        return zygote

    def _abandon(self, zygote: _RunningZygote) -> None:
        """Mark a zygote that does not respond as dead, so that another is started."""
        with self._lock:
            zygote.alive = False
            _hang_up(zygote.channel)

    def _read(self, zygote: _RunningZygote) -> None:
        """Read a zygote's messages until it ends.

        A future with an exception that was raised is a reference cycle: the traceback refers to the frames that wait
        for the future, and these to shared memory and sockets, until the garbage collector runs. So the exceptions of
        futures are never raised.
        """
        reason = ""
        try:
            while True:
                note, (sandbox, *values), descriptors = zygote.channel.receive()
                if note is ControlMessage.EXITED:
                    zygote.statuses.pop(sandbox).set_result(values[0])
                    continue
                fork = zygote.forks.pop(sandbox, None)
                if fork is None:  # the request has timed out
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif note is ControlMessage.FORKED and descriptors:
                    fork.set_result(descriptors[0])
                elif note is ControlMessage.FORKED:  # the sandbox ends, as its connection is closed
                    fork.set_exception(ZygoteError(_NO_DESCRIPTOR))
                else:
                    zygote.statuses.pop(sandbox)
                    fork.set_exception(ZygoteError(f"cannot fork a process: {values[0]}"))
        except ChannelClosed as closed:
            reason = str(closed)
        with self._lock:  # a concurrent `fork` either sees that it is dead, or its future fails below
            zygote.alive = False
        while zygote.forks:
            zygote.forks.popitem()[1].set_exception(ChannelClosed(reason))
        while zygote.statuses:
            zygote.statuses.popitem()[1].set_result(None)
        zygote.channel.close()
        _end(zygote.pidfd)


def pid_of(pidfd: int) -> int:
    """Return the PID in this process's PID namespace."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _refusal(protections: Protections, failures: list[str]) -> str:
    if not protections.sufficient:
        return f"this kernel cannot sandbox shipped code: {protections.missing()}"
    return (
        f"the sandbox self-test failed; these operations must be refused: {', '.join(failures)}. Please report this, "
        f"with: {protections.describe()}"
    )


def _end(pidfd: int) -> None:
    """Wait for a zygote whose channel is closed to exit; kill it after `END_TIMEOUT`. Its sandboxes die with it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(END_TIMEOUT * 1e3):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll()
    os.close(pidfd)


def _hang_up(channel: Channel) -> None:
    with contextlib.suppress(OSError):
        channel.connection.shutdown(socket.SHUT_RDWR)  # unlike `close`, wakes up the reader thread
