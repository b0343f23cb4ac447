"""The server's handle of a sandbox: its process, connection and shared memory, and calls with a deadline."""

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
from collections.abc import Callable, Collection
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TypeVar

import torch

from logitship.client.scrub import scrub
from logitship.sampler.edits.edit_codec import VectorStore, decode
from logitship.sampler.edits.edit_operations import GroupEdits

from .call_exchange import CallExchange, InvalidAnswer
from .cpu_time import (
    DEFERRED_NICE,
    IDLE_AFTER,
    CallDeadline,
    ProcessClock,
    leave_background,
    lower_priority,
    off_this_core,
    restore_priority,
    run_when_idle,
)
from .protocol import (
    DUMP_SIGNAL,
    EDITS_HEADER,
    FLOAT_BYTES,
    MAX_PRINTED,
    Answer,
    Command,
    pack,
)
from .zygote_process import ForkedProcess, ZygoteProcess, pid_of

T = TypeVar("T")

_STATUS_TIMEOUT = 0.25
"""Seconds to wait for the wait status of a process that closed its connection and still runs."""

_ENDED_STATUS_TIMEOUT = 5.0
"""Seconds to wait for the wait status of a process that ends or has ended. On a busy machine it comes late: a process
with the lowest priority takes long to end, and the zygote that reports it runs in the background."""

_STATUS_INTERVAL = 0.002
"""Seconds between two looks whether the wait status has arrived."""

_DUMP_PAUSE = 0.01
"""Seconds after which a dump is complete, if no more of it came: of CPU time; or of wall-clock time, as far as the
process waits. The kernel may take its core between two lines."""

_DUMP_TIMEOUT = 0.1
"""Seconds that it may take for that: of CPU time; or of wall-clock time, as far as it waits."""

_DUMP_BACKSTOP = 2.0
"""Most wall-clock seconds for that, however few of them it gets of the cores."""


class SandboxDied(Exception):
    """The process of a sandbox has died, and its state is lost.

    Attributes:
        kind: kind of the fault, see `ProcessorFault`; "unloaded" if a load was cancelled, which is none.
        reason: the rest of a sentence that begins with the processor's name.
        dump: faulthandler's dump of the stack of a process that gave no answer, not trusted; empty if there is none.
    """

    def __init__(self, kind: str, reason: str, dump: bytes = b"") -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.dump = dump


@dataclass
class _Overdue:
    """A call that exceeded its deadline, and whose process was asked where it is.

    Attributes:
        limit: what `CallDeadline.exceeded` returned.
        num_before: bytes received before it was asked.
        num_received: bytes received so far.
        deadline: of its response, since it was asked.
        pause: of the next part of its response, since the last one.
    """

    limit: str
    num_before: int
    num_received: int
    deadline: CallDeadline
    pause: CallDeadline


class Sandbox:
    """One locked-down process. Calls are made by one thread at a time; `kill` is thread-safe.

    On any error the process is killed, and this and all later calls raise `SandboxDied` with the first reason.

    Attributes:
        group: handles of the sequences of the last GROUP.
        last_deadline: deadline of the last call that ended; None before the first.
        descriptor: file descriptor of its connection, which is readable once an answer arrives.
    """

    def __init__(self, zygote: ZygoteProcess, max_rows: int, vocab_size: int) -> None:
        """Fork a sandbox.

        Raises:
            ZygoteError: no zygote can be started.
            OSError: this process is out of memory or file descriptors.
        """
        shared_memory = _sealed_memory(max_rows * vocab_size * FLOAT_BYTES)
        with contextlib.ExitStack() as at_once, contextlib.ExitStack() as on_failure:
            at_once.callback(os.close, shared_memory)
            self._connection, other_end = socket.socketpair()
            at_once.callback(other_end.close)
            on_failure.callback(self._connection.close)
            memory = mmap.mmap(shared_memory, 0)
            on_failure.callback(memory.close)
            self._process: ForkedProcess = zygote.fork(other_end.fileno(), shared_memory)
            on_failure.callback(os.close, self._process.pidfd)
            self._pid = pid_of(self._process.pidfd)
            self._clock = ProcessClock(self._pid)
            on_failure.pop_all()
        values = torch.frombuffer(memory, dtype=torch.float32, count=max_rows * vocab_size)
        self._logits: torch.Tensor | None = values.view(max_rows, -1)
        self._vectors = VectorStore(vocab_size)
        self._connection.setblocking(False)
        self.descriptor = self._connection.fileno()
        self._lock = threading.Lock()
        self._death: SandboxDied | None = None
        self._printed = ""
        self._call_number = 0
        self._has_low_priority = self._runs_when_idle = False
        self._outbox = bytearray()
        self._call: CallExchange | None = None
        self._overdue: _Overdue | None = None
        self.group: list[int] = []
        self.last_deadline: CallDeadline | None = None
        self._seconds_in_calls = 0.0
        self._lowest_balance = 0.0
        self._closed = False

    @property
    def logits(self) -> torch.Tensor:
        """The shared memory, float32 [max_rows, vocab]. The sandbox may write to it at any time.

        Raises:
            SandboxDied: the sandbox was closed.
        """
        logits = self._logits
        if logits is None:
            raise self.death
        return logits

    def decode_edits(self, body: bytes, num_rows: int) -> GroupEdits:
        """Decode the body of EDITS. To be called for each such answer, in order.

        Args:
            body: the body.
            num_rows: rows of the call.

        Raises:
            ValueError: it is malformed, or names rows or tokens that the call does not have.
            SandboxDied: the sandbox was closed.
        """
        if len(body) < EDITS_HEADER.size:
            raise ValueError("no header")
        vocab_size = self.logits.shape[-1]
        _, shared_size = EDITS_HEADER.unpack_from(body)
        encoded = self._copy_shared(shared_size) if shared_size else body[EDITS_HEADER.size :]
        return decode(encoded, num_rows, vocab_size, self._vectors)

    def _copy_shared(self, size: int) -> bytearray:
        """Return a copy of the first bytes of the shared memory, which the sandbox may change at any time."""
        shared = self.logits.view(-1).view(torch.uint8)
        if size > len(shared):
            raise ValueError("longer than the shared memory")
        return bytearray(shared[:size].numpy().data)

    @property
    def alive(self) -> bool:
        """False once the sandbox is known to be dead."""
        return self._death is None

    @property
    def is_running(self) -> bool:
        """False once the process has ended or was killed. Never blocks."""
        with self._lock:
            return self._runs()

    def _runs(self) -> bool:
        """As `is_running`. The caller holds the lock, because `close` closes the pidfd."""
        return self._death is None and not _is_readable(self._process.pidfd)

    @property
    def in_call(self) -> bool:
        """True while a call is in flight."""
        return self._call is not None

    @property
    def is_receiving(self) -> bool:
        """True while a call is in flight whose connection was not found closed."""
        return self._call is not None and self._call.closed_at is None

    @property
    def was_lost(self) -> bool:
        """True if it ended because the zygote did."""
        status = self._process.status
        return status.done() and status.result() is None

    @property
    def was_killed(self) -> bool:
        """True if another process killed it: the kernel does when memory is short."""
        return self._death is not None and self._death.reason == _ended_by(signal.SIGKILL)

    @property
    def is_new(self) -> bool:
        """True until the first call after LOAD begins."""
        return self._call_number <= 1

    @property
    def death(self) -> SandboxDied:
        """The reason of its death. Only for a dead sandbox."""
        assert self._death is not None
        return SandboxDied(self._death.kind, self._death.reason, self._death.dump)

    def enqueue(self, command: Command, body: bytes) -> None:
        """Queue a command that has no answer, to be sent with the next call."""
        self._outbox += pack(command, 0, body)

    def flush(self) -> None:
        """Send queued commands without blocking."""
        if self._call is None:
            with contextlib.suppress(OSError):
                del self._outbox[: self._connection.send(self._outbox, socket.MSG_NOSIGNAL)]

    def begin(self, command: Command, body: bytes, timeout: float, backstop: float | None = None) -> None:
        """Begin a call. Never blocks.

        Args:
            command: one that has an answer.
            body: the body of the message.
            timeout: seconds that the answer may take, see `CallDeadline`.
            backstop: wall-clock seconds that it may take at most, see `CallDeadline`. After PROMISE, they are counted
                from `start_waiting`.

        Raises:
            SandboxDied: the sandbox is dead.
        """
        if self._call is not None:
            self.kill("crash", "was killed because its previous call was not finished")
        self._check_alive()
        self._call_number += 1
        is_awaited = command is not Command.PROMISE
        deadline = CallDeadline(self._clock, timeout, backstop, is_awaited=is_awaited)
        outbox = bytes(self._outbox)
        self._outbox.clear()
        self._call = CallExchange(self._connection, outbox, command, self._call_number, body, deadline)
        # An awaited call may start on this core: this thread will sleep.
        core = contextlib.nullcontext() if is_awaited else off_this_core(self._pid)
        with core, contextlib.suppress(SandboxDied):  # `finish` raises it
            self._call.send()

    def finish(self) -> tuple[Answer, bytes]:
        """Wait for the answer to the call in flight.

        Raises:
            SandboxDied: the sandbox died without an answer.
        """
        while (answer := self.advance()) is None:
            wait_for_any([self])
        return answer

    def start_waiting(self) -> None:
        """Count wall-clock time of the call in flight from now on: its step waits for the answer until it comes."""
        if self._call is not None and self._overdue is None:
            self._call.deadline.start_waiting()

    def defer(self, backstop: float) -> None:
        """Continue the call in flight at the lowest priority, because no step waits for it.

        Args:
            backstop: wall-clock seconds that it may take at most, see `CallDeadline`.
        """
        if self._call is not None:
            self._call.deadline.extend(backstop)
            self.lower_priority_of_call()

    def lower_priority_of_call(self) -> None:
        """Continue the call in flight at the lowest priority."""
        with self._lock:  # another thread may be receiving the answer
            if self._call is not None and not self._has_low_priority:
                self._has_low_priority = True
                if self._runs():
                    lower_priority(self._pid, DEFERRED_NICE)

    def _leave_cores(self, call: CallExchange) -> None:
        """Let a call that nobody waits for run only while cores are idle, once it has computed for long."""
        if not self._runs_when_idle and call.deadline.cpu_seconds() > IDLE_AFTER:
            with self._lock:
                if self._call is call and self._runs():
                    self._runs_when_idle = True
                    run_when_idle(self._pid)

    def advance(self) -> tuple[Answer, bytes] | None:
        """Send and receive without blocking.

        Returns:
            The answer to the call in flight, which ends the call; None if it is not complete.

        Raises:
            SandboxDied: the sandbox died without an answer, which ends the call too.
        """
        call = self._call
        assert call is not None
        try:
            answer = self._exchange(call)
        except SandboxDied:
            self._end_call(call)
            raise
        # Not if it is dead without an exception: another thread has killed it since, and the next `advance` raises.
        if answer is not None:
            self._end_call(call)
        elif self._has_low_priority:
            self._leave_cores(call)
        return answer

    def take_printed(self) -> str:
        """Return what was printed since the last time, scrubbed like a sandbox's other texts, and clear it."""
        printed, self._printed = self._printed, ""
        return scrub(printed)[-MAX_PRINTED:] if printed else ""

    def check(self) -> bool:
        """Return whether the process is alive. Unlike `alive`, detects that it died while idle.

        If it has ended, blocks until its wait status arrives, for at most `_ENDED_STATUS_TIMEOUT` seconds.
        """
        if self.alive and not self.is_running:
            self.kill("crash", self._exit_reason(_ENDED_STATUS_TIMEOUT))
        return self.alive

    def record_end(self) -> None:
        """Record the death of a process that has ended, once its wait status has arrived. Never blocks."""
        if self._process.status.done():
            self.kill("crash", self._exit_reason(timeout=0))

    def kill(self, kind: str, reason: str, dump: bytes = b"") -> None:
        """Kill the process. The first reason given is kept; for the arguments see `SandboxDied`."""
        with self._lock:
            if self._death is not None:
                return
            self._death = SandboxDied(kind, reason, dump)
            if not _is_readable(self._process.pidfd):
                lower_priority(self._pid, DEFERRED_NICE)  # to free its memory takes milliseconds
            self._process.kill()
            # Wakes up a waiting thread. The descriptors are closed by `close`.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def leave_background(self) -> None:
        """Give the process the server's priority and cores, as it has loaded its class."""
        if self.is_running:
            leave_background(self._pid)

    def reject_answer(self) -> SandboxDied:
        """Kill the process because of an invalid answer. Return the exception to raise."""
        self.kill("protocol", "sent an invalid answer: its process was killed")
        return self.death

    def close(self) -> None:
        """Release its resources, and kill the process if it is alive, because it is no longer needed."""
        self.kill("crash", "was unloaded")
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._process.pidfd)
                self._connection.close()
                self._logits = None  # unmapped with its last view

    def cpu_seconds_outside_calls(self) -> float:
        """Return the recent CPU time used outside calls. To be called regularly by one thread.

        Idle time within a call is no credit for later: like the waiting time of a queue (Lindley 1952), the balance of
        CPU time minus call time is counted from its lowest value so far.
        """
        call = self._call
        in_calls = self._seconds_in_calls + (time.perf_counter() - call.deadline.began if call else 0.0)
        used = self._clock.cpu_seconds()
        if used is None:  # it has ended
            return 0.0
        balance = used - in_calls
        self._lowest_balance = min(self._lowest_balance, balance)
        return balance - self._lowest_balance

    def _end_call(self, call: CallExchange) -> None:
        self._printed = (self._printed + call.printed)[-MAX_PRINTED:]
        self._seconds_in_calls += time.perf_counter() - call.deadline.began
        self.last_deadline = call.deadline
        with self._lock:
            self._call = None
            if self._has_low_priority:
                self._has_low_priority = self._runs_when_idle = False
                if self._runs():
                    restore_priority(self._pid)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self.death

    def _fail(self, kind: str, reason: str, dump: bytes = b"") -> SandboxDied:
        self.kill(kind, reason, dump)
        return self.death

    def _exchange(self, call: CallExchange) -> tuple[Answer, bytes] | None:
        self._check_alive()
        call.send()
        call.receive()
        if self._overdue is not None:
            self._fail_with_dump(call, self._overdue)
            return None
        if call.closed_at is not None:
            self._parse(call.take_messages_printed)
            self._fail_once_ended(call.closed_at)
            return None
        answer = self._parse(call.answer)
        # Checked last: an answer that arrived in time may be read late, because the server waited for another sandbox.
        if answer is None and (limit := call.deadline.exceeded()) is not None:
            call.receive()  # it may have answered just before it was looked at
            answer = self._parse(call.answer)
            if answer is None:
                self._ask_where_it_is(call, limit)
        return answer

    def _parse(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except InvalidAnswer:
            raise self.reject_answer() from None

    def _ask_where_it_is(self, call: CallExchange, limit: str) -> None:
        """Let the process write where it is to the connection. It will be killed: no answer is accepted any more."""
        num_received = len(call.received)
        deadline = CallDeadline(self._clock, _DUMP_TIMEOUT, _DUMP_BACKSTOP)
        self._overdue = _Overdue(limit, num_received, num_received, deadline, self._dump_pause())
        call.deadline.next_look = deadline.began + _DUMP_PAUSE
        self._process.send(DUMP_SIGNAL)

    def _dump_pause(self) -> CallDeadline:
        return CallDeadline(self._clock, _DUMP_PAUSE, _DUMP_BACKSTOP)

    def _fail_with_dump(self, call: CallExchange, overdue: _Overdue) -> None:
        """Kill the process once it has written where it is, or its time for that is up. Never blocks.

        Raises:
            SandboxDied: it has, or did not.
        """
        received = call.received
        if len(received) > overdue.num_received:
            overdue.num_received, overdue.pause = len(received), self._dump_pause()
        dump = bytes(received[overdue.num_before :])
        is_complete = dump.endswith(b"\n") and overdue.pause.exceeded() is not None
        is_late = overdue.deadline.exceeded() is not None
        if is_complete or is_late or call.closed_at is not None:
            raise self._fail("deadline", f"gave no answer within {overdue.limit}: its process was killed", dump)
        call.deadline.next_look = time.perf_counter() + _DUMP_PAUSE

    def _fail_once_ended(self, closed_at: float) -> None:
        """Kill the process once its wait status is known, or the time for it is up. Never blocks other calls.

        Raises:
            SandboxDied: it is known, or did not come.
        """
        waited = time.perf_counter() - closed_at
        may_continue = self.is_running and not self._clock.is_exiting()
        timeout = _STATUS_TIMEOUT if may_continue else _ENDED_STATUS_TIMEOUT
        if self._process.status.done() or waited >= timeout:
            raise self._fail("crash", self._exit_reason(timeout=0))

    def _exit_reason(self, timeout: float) -> str:
        try:
            status = self._process.status.result(timeout)
        except FutureTimeout:
            return "closed its connection: its process was killed"
        if status is None:
            return "was lost: the process that sandboxes are forked from ended"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended its process with exit status {code}"
        return _ended_by(-code)


def wait_for_any(sandboxes: Collection[Sandbox], timeout: float = math.inf) -> list[Sandbox]:
    """Wait until a call can `advance`, or its deadline must be looked at.

    Args:
        sandboxes: at least one, each with a call in flight.
        timeout: longest time to wait, in seconds.

    Returns:
        The sandboxes to `advance`; none after `timeout`.
    """
    poll = select.poll()
    waiting: dict[int, tuple[Sandbox, float]] = {}
    closed: list[Sandbox] = []
    next_look = math.inf
    for sandbox in sandboxes:
        call = sandbox._call
        assert call is not None
        if call.closed_at is not None:  # its connection stays readable
            closed.append(sandbox)
            next_look = min(next_look, time.perf_counter() + _STATUS_INTERVAL)
            continue
        next_look = min(next_look, call.deadline.next_look)
        try:
            descriptor = sandbox._connection.fileno()
            poll.register(descriptor, select.POLLIN | (0 if call.is_sent else select.POLLOUT))
        except ValueError:  # closed by another thread
            return [sandbox]
        waiting[descriptor] = sandbox, call.deadline.next_look
    seconds = min(timeout, max(0.0, next_look - time.perf_counter()))
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1e3)}
    now = time.perf_counter()
    due = [sandbox for descriptor, (sandbox, look) in waiting.items() if descriptor in ready or now >= look]
    return closed + due


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _ended_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"ended its process: signal {number}"
    return f"ended its process: {name} ({(signal.strsignal(number) or name).lower()})"


def _sealed_memory(size: int) -> int:
    """Create shared memory of fixed size; return its descriptor. If it could shrink, the server might get SIGBUS."""
    descriptor = os.memfd_create("logitship", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:  # cleanup, then re-raised
        os.close(descriptor)
        raise
    return descriptor
