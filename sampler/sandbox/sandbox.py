"""The server's handle of one sandbox: its process, its connection, its region, and calls with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import torch

from .protocol import FLOAT_BYTES, HEADER, LONGEST_ANSWER, Answer, Command, pack
from .zygote_process import ForkedProcess, ZygoteProcess

_STATUS_TIMEOUT = 0.25
"""Seconds to wait for the wait status of a process whose connection ended: it is on its way."""

_PIECE = 4096
"""Bytes of an answer that are read at once."""

_TICK = 1 / os.sysconf("SC_CLK_TCK")


class SandboxDied(Exception):
    """A sandbox is gone, and with it all that was in it.

    Attributes:
        kind: in which way, see `ProcessorFault`.
        reason: the rest of a sentence that begins with the processor.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass
class _Call:
    """A call under way.

    Attributes:
        unsent: what the sandbox has not taken yet.
        received: of the answer so far.
        deadline: on the clock of `time.perf_counter`.
    """

    number: int
    unsent: memoryview
    received: bytearray
    began: float
    deadline: float


class Sandbox:
    """One locked process. Calls are made by one thread at a time; `kill` and `cpu_seconds_outside_calls` by any.

    Whatever goes wrong, the process is killed, and this and all later calls raise `SandboxDied` with the first reason.

    Attributes:
        group: handles of the sequences that it was told the rows of a call belong to.
    """

    def __init__(self, zygote: ZygoteProcess, max_rows: int, vocab_size: int) -> None:
        """Fork a sandbox.

        Raises:
            ZygoteError: there is no zygote to fork it from.
            OSError: this process has no room for it, or no descriptors left.
        """
        region = _sealed_memory(max_rows * vocab_size * FLOAT_BYTES)
        with contextlib.ExitStack() as at_once, contextlib.ExitStack() as on_failure:
            at_once.callback(os.close, region)
            self._connection, theirs = socket.socketpair()
            at_once.callback(theirs.close)
            on_failure.callback(self._connection.close)
            memory = mmap.mmap(region, 0)
            self._process: ForkedProcess = zygote.fork(theirs.fileno(), region)
            on_failure.callback(os.close, self._process.pidfd)
            self._stat = f"/proc/{_pid(self._process.pidfd)}/stat"
            on_failure.pop_all()
        region_as_tensor = torch.frombuffer(memory, dtype=torch.float32, count=max_rows * vocab_size)
        self._logits: torch.Tensor | None = region_as_tensor.view(max_rows, -1)
        self._connection.setblocking(False)
        self._lock = threading.Lock()
        self._death: SandboxDied | None = None
        self._numbers = 0
        self._outbox = bytearray()
        self._call: _Call | None = None
        self.group: list[int] = []
        self._seconds_in_calls = 0.0
        self._lowest_balance = 0.0
        self._closed = False

    @property
    def logits(self) -> torch.Tensor:
        """The region, float32 [max_rows, vocab]. The sandbox may change it at any time.

        Raises:
            SandboxDied: it was closed.
        """
        logits = self._logits
        if logits is None:
            raise self.death
        return logits

    @property
    def alive(self) -> bool:
        """False once it is known to be dead."""
        return self._death is None

    @property
    def death(self) -> SandboxDied:
        """How it died."""
        assert self._death is not None
        return SandboxDied(self._death.kind, self._death.reason)

    def tell(self, kind: Command, body: bytes) -> None:
        """Say something that has no answer, with the next call."""
        self._outbox += pack(kind, 0, body)

    def flush(self) -> None:
        """Send what was said, as far as that needs no waiting."""
        if self._call is None:
            with contextlib.suppress(OSError):
                del self._outbox[: self._connection.send(self._outbox, socket.MSG_NOSIGNAL)]

    def begin(self, kind: Command, body: bytes, timeout: float) -> None:
        """Begin a call. Never waits.

        Args:
            timeout: seconds from now until the answer must be here.

        Raises:
            SandboxDied: it is dead.
        """
        if self._call is not None:
            self.kill("crash", "was left in the middle of a call")
        self._check_alive()
        self._numbers += 1
        began = time.perf_counter()
        message = bytes(self._outbox) + pack(kind, self._numbers, body)
        self._outbox.clear()
        self._call = _Call(self._numbers, memoryview(message), bytearray(), began, began + timeout)
        with contextlib.suppress(SandboxDied):  # `finish` says it
            self._send(self._call)

    def finish(self) -> tuple[Answer, bytes]:
        """Wait for the answer to the call that was begun.

        Raises:
            SandboxDied: there is none.
        """
        while (answer := self.advance()) is None:
            wait_for_any([self])
        return answer

    def advance(self) -> tuple[Answer, bytes] | None:
        """Send and receive what is possible now. Never waits.

        Returns:
            The answer to the call that was begun, which ends it; None if it is not here yet.

        Raises:
            SandboxDied: there is none. This ends the call too.
        """
        call = self._call
        assert call is not None
        answer = None
        try:
            answer = self._exchange(call)
        finally:
            if answer is not None or not self.alive:
                self._seconds_in_calls += time.perf_counter() - call.began
                self._call = None
        return answer

    def check(self) -> bool:
        """Whether it lives, which its end while nobody asked it for anything shows too."""
        with self._lock:  # `close` closes the descriptor
            ended = self._death is None and _is_readable(self._process.pidfd)
        if ended:
            self.kill("crash", self._how_it_ended())
        return self.alive

    def kill(self, kind: str, reason: str) -> None:
        """End it. The first reason given is the one that is told."""
        with self._lock:
            if self._death is not None:
                return
            self._death = SandboxDied(kind, reason)
            self._process.kill()
            # Whoever waits for it wakes up; the descriptors go with the last reference.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def reject_answer(self) -> SandboxDied:
        """Kill it because of what it answered."""
        self.kill("protocol", "answered what no worker answers: its process was killed")
        return self.death

    def close(self) -> None:
        """End it because nobody needs it any more, and give back what it holds here."""
        self.kill("crash", "was unloaded")
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._process.pidfd)
                self._connection.close()
                self._logits = None  # the mapping goes with its last view

    def cpu_seconds_outside_calls(self) -> float:
        """CPU time that it used of late while nobody had asked it for anything. For one thread, which asks regularly.

        Time of calls in which it did not compute is no credit for later: only what has been used since the time when
        there was none left over counts, as in the waiting time of a queue (Lindley 1952).
        """
        call = self._call
        in_calls = self._seconds_in_calls + (time.perf_counter() - call.began if call else 0.0)
        try:
            with open(self._stat, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            return 0.0
        balance = (int(fields[11]) + int(fields[12])) * _TICK - in_calls  # utime, stime
        self._lowest_balance = min(self._lowest_balance, balance)
        return balance - self._lowest_balance

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self.death

    def _die(self, kind: str, reason: str) -> SandboxDied:
        self.kill(kind, reason)
        return self.death

    def _exchange(self, call: _Call) -> tuple[Answer, bytes] | None:
        self._check_alive()
        if call.unsent:
            self._send(call)
        self._receive(call)
        answer = self._answer(call)
        # Asked only now: what came in time may be looked at late, because another sandbox was waited for.
        if answer is None and time.perf_counter() >= call.deadline:
            seconds = call.deadline - call.began
            raise self._die("deadline", f"gave no answer within {seconds:g} s: its process was killed")
        return answer

    def _receive(self, call: _Call) -> None:
        # One byte more than the longest answer: whoever sends that is found out without reading on. In pieces, because
        # `recv` takes memory for all that it is asked for, and most answers have no body.
        rest = HEADER.size + LONGEST_ANSWER + 1 - len(call.received)
        try:
            piece = self._connection.recv(min(rest, _PIECE))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            raise self._die("crash", self._how_it_ended())
        call.received += piece

    def _send(self, call: _Call) -> None:
        while call.unsent:
            try:
                call.unsent = call.unsent[self._connection.send(call.unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return
            except OSError:
                raise self._die("crash", self._how_it_ended()) from None

    def _answer(self, call: _Call) -> tuple[Answer, bytes] | None:
        """The answer, once it is here in full.

        Raises:
            SandboxDied: it cannot be the answer of an honest worker.
        """
        if len(call.received) < HEADER.size:
            return None
        kind, number, size = HEADER.unpack_from(call.received)
        end = HEADER.size + size
        answer = _ANSWERS.get(kind)
        if number != call.number or size > LONGEST_ANSWER or len(call.received) > end or answer is None:
            raise self.reject_answer()
        if len(call.received) < end or call.unsent:
            return None
        return answer, bytes(call.received[HEADER.size :])

    def _how_it_ended(self) -> str:
        try:
            status = self._process.status.result(_STATUS_TIMEOUT)
        except FutureTimeout:
            return "closed its connection: its process was killed"
        if status is None:
            return "was lost: the process that sandboxes come from ended"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended its process with exit status {code}"
        return f"ended its process: {_signal_name(-code)}"


def wait_for_any(sandboxes: Collection[Sandbox]) -> list[Sandbox]:
    """Wait until a call under way can `advance`, or its time is up.

    Args:
        sandboxes: at least one; a call is under way in each.

    Returns:
        Those of which that is true.
    """
    poll = select.poll()
    waiting: dict[int, tuple[Sandbox, float]] = {}
    first_deadline = math.inf
    for sandbox in sandboxes:
        call = sandbox._call
        assert call is not None
        first_deadline = min(first_deadline, call.deadline)
        try:
            descriptor = sandbox._connection.fileno()
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if call.unsent else 0))
        except ValueError:  # another thread closed it just now
            return [sandbox]
        waiting[descriptor] = sandbox, call.deadline
    ready = {descriptor for descriptor, _ in poll.poll(max(0.0, first_deadline - time.perf_counter()) * 1e3)}
    now = time.perf_counter()
    return [sandbox for descriptor, (sandbox, deadline) in waiting.items() if descriptor in ready or now >= deadline]


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
    return f"{name} ({(signal.strsignal(number) or name).lower()})"


_ANSWERS = {int(answer): answer for answer in Answer}


def _sealed_memory(size: int) -> int:
    """Descriptor of shared memory whose size nobody can change: reading what was cut off would kill the server."""
    descriptor = os.memfd_create("logitship", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _pid(pidfd: int) -> int:
    """The process's number as this process sees it: the zygote sees another."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
