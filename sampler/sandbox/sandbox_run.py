"""One call of a sandboxed processor: send the new sequences and tokens, copy the rows in, copy the result out."""

from __future__ import annotations

import marshal
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import orjson
import torch

from logitship.client.author_errors import is_shipped_source
from logitship.client.errors import ProcessorFault
from logitship.client.scrub import scrub
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor, source_lines
from logitship.sampler.edits.edit_operations import GroupEdits
from logitship.sampler.edits.merged_edits import apply_edits
from logitship.sampler.processors.call_state import CallState
from logitship.sampler.processors.class_description import ClassDescription
from logitship.sampler.processors.early_calls import ReadHistory
from logitship.sampler.processors.executor import (
    CollectEdits,
    ExecutorSequence,
    LogitsUse,
    RunOutcome,
)
from logitship.sampler.processors.internal_faults import internal_fault
from logitship.sampler.sampling_params import SANDBOXED_FIELDS

from .call_exchange import AnswerReceiver
from .cpu_time import DEFERRED_BACKSTOP
from .protocol import SECONDS, Answer, Command
from .sandbox import Sandbox, SandboxDied, wait_for_any
from .stack_dump import traceback_of

MAX_TEXT_LENGTH = 8192
"""Characters kept of a message or traceback from a sandbox."""


class SandboxedProcessor:
    """A processor and the sandbox it runs in; a sandbox that died is replaced.

    Attributes:
        digest: the processor's identity.
        tenant: the tenant it belongs to.
        string: its class.
        lock: held while a sandbox is started.
        sandbox: the sandbox that was started last; None before the first.
        class_description: description of the class. It comes from the sandbox, so it is not trusted.
        reads: which calls used the values of their logits.
    """

    def __init__(self, string: PickledProcessor | SourceProcessor, tenant: str) -> None:
        self.digest = string.digest
        self.tenant = tenant
        self.string = string
        self.lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self.class_description = ClassDescription("")
        self.reads = ReadHistory()

    def describe(self, description: ClassDescription) -> None:
        """Set the description of the class, which was loaded."""
        self.class_description = description
        self.reads.never_promise = bool(description.dense_reason)

    @property
    def name(self) -> str:
        """The class's name."""
        return self.class_description.name

    @property
    def current_sandbox(self) -> Sandbox:
        """The last sandbox, alive or dead. Only after the first was started."""
        assert self.sandbox is not None
        return self.sandbox

    def fault_of_death(self, died: SandboxDied) -> ProcessorFault:
        """Return the fault of the rows whose sandbox died."""
        return self.make_fault(died.kind, f"processor {self.name} {died.reason}", self.traceback_of(died))

    def traceback_of(self, died: SandboxDied) -> str:
        """Return where a sandbox was that gave no answer; "" if that is not known."""
        return traceback_of(died.dump, self._line_of()) if died.dump else ""

    def _line_of(self) -> Callable[[str, int], str]:
        """Return the function that finds a line of the source by its file and number."""
        if isinstance(self.string, PickledProcessor):
            return self.string.listing.line if self.string.listing is not None else _no_line
        lines = source_lines(self.string.source)
        return lambda filename, number: (
            lines[number - 1] if is_shipped_source(filename) and number <= len(lines) else ""
        )

    def fault_of(self, kind: str, reason: str) -> ProcessorFault:
        """Return a fault of this processor. `reason` continues a sentence that begins with the processor's name."""
        return self.make_fault(kind, f"processor {self.name} {reason}", "")

    def make_fault(self, kind: str, message: str, traceback: str) -> ProcessorFault:
        """Return a fault of this processor with this message and traceback."""
        return ProcessorFault(message, digest=self.digest, name=self.name, kind=kind, traceback=traceback)


def _no_line(filename: str, number: int) -> str:
    return ""


def read_faults(body: bytes, processor: SandboxedProcessor, num_rows: int) -> dict[int, ProcessorFault]:
    """Parse the body of FAULTS. Return the faults by row of the call.

    Raises:
        ValueError: the body is malformed, or names a row that the call does not have.
    """
    parsed = orjson.loads(body)  # its error is a ValueError too
    if not isinstance(parsed, list) or not parsed:
        raise ValueError("no list of faults")
    faults: dict[int, ProcessorFault] = {}
    for each in parsed:
        match each:
            case [[*rows], "exception" | "bad_result" | "uncopyable" as kind, str(message), str(traceback)] if all(
                type(row) is int and 0 <= row < num_rows for row in rows
            ):
                fault = processor.make_fault(
                    kind, scrub(message)[:MAX_TEXT_LENGTH], scrub(traceback)[-MAX_TEXT_LENGTH:]
                )
                faults |= dict.fromkeys(rows, fault)
            case _:
                raise ValueError("not a fault")
    return faults


class SandboxRow:
    """An `ExecutorRow` whose processor runs in a sandbox.

    Args:
        handles: yields numbers that identify a sequence.

    Attributes:
        sequence: the sequence, as given by the engine.
        handle: its number in the sandbox.
        sandbox: the sandbox that has the sequence; None until its first call.
        num_sent: number of output tokens already sent to that sandbox.
    """

    def __init__(self, sequence: ExecutorSequence, handles: Iterator[int]) -> None:
        self.sequence = sequence
        self._handles = handles
        self.handle = next(handles)
        self.sandbox: Sandbox | None = None
        self.num_sent = 0

    def fork(self, output_token_ids: list[int]) -> SandboxRow:
        """Copy the sequence in its sandbox, see `ExecutorRow.fork`. A failed copy is reported by its next call."""
        copy = SandboxRow(replace(self.sequence, output_token_ids=output_token_ids), self._handles)
        copy.sandbox, copy.num_sent = self.sandbox, self.num_sent
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.enqueue(Command.FORK, marshal.dumps((self.handle, copy.handle)))
        return copy

    def close(self) -> None:
        """Free the sequence's state in its sandbox."""
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.enqueue(Command.DETACH, marshal.dumps(self.handle))
            self.sandbox.flush()  # this may have been the last call: free the sequence's state now

    def attach_message(self) -> bytes:
        """Return the body of ATTACH, and count its output tokens as sent.

        Raises:
            ValueError: the parameters are not plain values.
        """
        sequence = self.sequence
        self.num_sent = len(sequence.output_token_ids)
        return marshal.dumps(
            (
                self.handle,
                sequence.rid,
                dict(sequence.params),
                array("q", sequence.prompt_token_ids).tobytes(),
                array("q", sequence.output_token_ids).tobytes(),
                {name: getattr(sequence.sampling_params, name) for name in SANDBOXED_FIELDS},
            )
        )

    def take_new_tokens(self) -> list[int]:
        """Return the output tokens not sent to the sandbox yet, and count them as sent."""
        tokens = self.sequence.output_token_ids[self.num_sent :]
        self.num_sent += len(tokens)
        return tokens


def step_message(sandbox: Sandbox, rows: Sequence[SandboxRow]) -> bytes:
    """Return the body of STEP, empty if no row has new tokens. Enqueues GROUP first if the rows changed.

    Args:
        sandbox: the sandbox to call.
        rows: the rows of the call, all attached to the sandbox.
    """
    handles = [row.handle for row in rows]
    if handles != sandbox.group:
        sandbox.enqueue(Command.GROUP, marshal.dumps(handles))
        sandbox.group = handles
    tokens = [row.take_new_tokens() for row in rows]
    return marshal.dumps(tokens) if any(tokens) else b""


class SandboxRun:
    """A `Run` in a sandbox. Its life is that of `call_state`.

    Args:
        timeout: seconds that the call may take, see `CallDeadline`.
        backstop: wall-clock seconds that it may take at most.
        pending: all runs that wait for an answer. `finish` serves all of them while it waits for its own, so that no
            run misses its deadline because of another.
        use_credit: takes the seconds of the first call in a sandbox, which has a deadline of its own.

    Attributes:
        state: the state of the call. Changed on the receiver's thread until the engine's thread takes over.
    """

    def __init__(
        self,
        processor: SandboxedProcessor,
        timeout: float,
        backstop: float,
        pending: list[SandboxRun],
        use_credit: Callable[[float], None] | None = None,
    ) -> None:
        self._processor = processor
        self._timeout = timeout
        self._backstop = backstop
        self._pending = pending
        self._use_credit = use_credit
        self.state = CallState.NEW
        self._command = Command.STEP
        """The command that was sent last, for the call."""
        self._logits_use: LogitsUse = "given"
        self._logits: torch.Tensor | None = None
        self._faults: dict[int, ProcessorFault] = {}
        self._sandbox: Sandbox | None = None
        self._num_rows = 0
        self._rows_in_call: list[int] = []
        self._receiver: AnswerReceiver | None = None
        self._edits: GroupEdits = ()
        self._has_low_priority = False
        self._printed = ""
        self._seconds = self._seconds_used = self._occupied = self._seconds_waited = 0.0
        self._began = time.perf_counter()

    def _enter(self, state: CallState) -> None:
        self.state = self.state.next(state)

    def _fail(self, died: SandboxDied) -> None:
        """End the call, whose sandbox died."""
        self._enter(CallState.FAILED)
        self._give_fault(self._rows_in_call, died)

    def _give_fault(self, rows: Sequence[int], died: SandboxDied) -> None:
        self._faults |= dict.fromkeys(rows, self._processor.fault_of_death(died))

    def begin(self, sandbox: Sandbox, rows: Sequence[SandboxRow], logits: torch.Tensor | None) -> None:
        """Attach new sequences, and send the call. Never blocks.

        Args:
            sandbox: the processor's sandbox, which may have ended.
            rows: the rows of the call.
            logits: float32 [rows, vocab]; None: promise them.
        """
        self._logits = logits
        self._num_rows = len(rows)
        self._rows_in_call = [
            index for index, row in enumerate(rows) if row.sandbox is sandbox or self._attach(sandbox, row, index)
        ]
        if logits is None:
            self._logits_use = "unread"
        if not self._rows_in_call:
            self._enter(CallState.FAILED)
            return
        self._enter(CallState.RECORDING if logits is None else CallState.RUNNING)
        self._sandbox = sandbox
        # A run of an aborted step may still be pending here. Beginning another call kills its sandbox.
        self._pending[:] = [run for run in self._pending if run._sandbox is not sandbox]
        message = step_message(sandbox, [rows[index] for index in self._rows_in_call])
        command = Command.PROMISE if logits is None else Command.STEP
        self._send_call(command, message, self._timeout, self._backstop)

    def _attach(self, sandbox: Sandbox, row: SandboxRow, index: int) -> bool:
        """Attach a new sequence to a sandbox. Return False if that is impossible; the row then has a fault."""
        if row.sandbox is not None:  # its state died with another sandbox
            self._give_fault([index], row.sandbox.death)
        elif not sandbox.is_running:
            # It is replaced at admission, never here: a step does not wait for a process to start.
            reason = "lost its process before the first step of this request: try again"
            self._give_fault([index], SandboxDied("load", reason))
        else:
            try:
                sandbox.enqueue(Command.ATTACH, row.attach_message())
            except ValueError as error:
                self._faults[index] = self._processor.fault_of("exception", f"cannot be given its parameters: {error}")
            else:
                row.sandbox = sandbox
                return True
        return False

    def receive_early(self, receiver: AnswerReceiver) -> None:
        """Let a receiver receive the answer to a call that was promised its logits, until they exist."""
        if self.state.is_open:
            assert self._sandbox is not None
            self._pending.remove(self)
            self._receiver = receiver
            receiver.watch(self._sandbox.descriptor, self.on_readable)

    def on_readable(self) -> bool:
        """Receive the answer on the receiver's thread. Return whether more of it may arrive."""
        assert self._sandbox is not None
        self.advance()
        if self.state.is_open:
            return self._sandbox.is_receiving
        self._receiver = None  # the engine's thread may begin the next exchange now
        return False

    def needs_logits(self) -> bool:
        """Return whether the call still needs its logits: False once it has ended with edits."""
        self._take_over()
        if self.state.is_open:
            self.advance()
        return self.state is not CallState.RECORDED

    def provide(self, logits: torch.Tensor) -> None:
        """Give the call its logits: send the rows now if the processor waits for them."""
        self._take_over()
        self._logits = logits
        if self.state is CallState.READING:
            self._enter(CallState.RUNNING)
            self._send_again(Command.ROWS)
        elif self.state.is_open:
            self._enter(CallState.RUNNING)
            assert self._sandbox is not None
            self._sandbox.start_waiting()

    def _take_over(self) -> None:
        """Receive the answer on this thread from now on, unless it was received early."""
        receiver = self._receiver  # whose thread may just be setting it to None
        if receiver is not None:
            assert self._sandbox is not None
            receiver.release(self._sandbox.descriptor)
            self._receiver = None
            if self.state.is_open:
                self._pending.append(self)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the call, and serve other calls meanwhile."""
        if not self.state.is_open:
            return True
        assert self._sandbox is not None
        if timeout == math.inf:
            self._sandbox.start_waiting()  # a promised call that sleeps uses no CPU time: it would never end
        self.advance()  # often the answer is already here, because the sandbox ran on this core
        began = time.perf_counter()
        until = began + timeout
        while self.state.is_open and (remaining := until - time.perf_counter()) > 0:
            runs = {run._sandbox: run for run in self._pending if run._sandbox is not None}
            for sandbox in wait_for_any(runs, remaining):
                runs[sandbox].advance()
        self._seconds_waited += time.perf_counter() - began
        return not self.state.is_open

    def lower_priority(self) -> None:
        """Continue the call at the lowest priority, also after further messages."""
        self._has_low_priority = True
        if self._sandbox is not None:
            self._sandbox.lower_priority_of_call()

    def defer(self, logits: torch.Tensor) -> None:
        """Continue the call after its step, at the lowest priority and with more wall-clock time."""
        self._enter(CallState.DEFERRED)
        self._logits = logits
        self._backstop = DEFERRED_BACKSTOP * self._timeout
        assert self._sandbox is not None
        self._sandbox.defer(self._backstop)

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        """Wait for the end of the call. Copy the rows out, or collect or apply the edits, and return the outcome."""
        self.wait(math.inf)
        ended = self.state
        self._enter(CallState.TAKEN)
        if ended is CallState.RECORDED:
            (collect or self._apply_edits)(self._rows_in_call, self._edits)
        elif ended is CallState.EDITED:
            self._copy_out()
        if self._logits_use != "given":
            self._processor.reads.observe(was_read=self._logits_use == "read")
        if self._use_credit is not None:
            self._use_credit(self._seconds_used)
        charged = 0.0 if self._use_credit is not None else self._seconds_used
        occupied = max(self._occupied, self._seconds_waited)
        for fault in set(self._faults.values()):
            fault.add_printed(self._printed)
        row_by_row = self._command is Command.RETRY
        return RunOutcome(self._seconds, self._faults, row_by_row, charged, occupied, self._logits_use, self._printed)

    def advance(self) -> None:
        """Receive the answer if it has arrived. Never blocks, and raises nothing: other calls are waited for too."""
        try:
            self._advance()
        # Whatever it raises is an error of the server, on data of a client.
        except Exception as error:  # noqa: BLE001  # boundary: engine thread
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End the call with a fault of its rows, because the server failed on its answer."""
        assert self._sandbox is not None
        self.state = CallState.FAILED  # whatever it was
        if self in self._pending:
            self._pending.remove(self)
        self._sandbox.kill("internal", "was killed because the server failed on its answer")
        fault = internal_fault(self._processor.name, self._processor.digest, error)
        self._faults |= dict.fromkeys(self._rows_in_call, fault)

    def _advance(self) -> None:
        assert self._sandbox is not None
        try:
            answer = self._sandbox.advance()
        except SandboxDied as died:
            self._add_time()
            self._fail(died)
            return
        if answer is None:
            return
        self._add_time(answer)
        match answer[0]:
            case Answer.READ:
                self._logits_use = "read"
                if self._logits is None:
                    self._enter(CallState.READING)
                else:
                    self._send_again(Command.ROWS)
            case Answer.AGAIN:
                self._send_again(Command.RETRY)
            case _:
                self._take_answer(*answer)

    def _add_time(self, answer: tuple[Answer, bytes] | None = None) -> None:
        """Add up the time of an exchange with the sandbox that has ended."""
        assert self._sandbox is not None
        self._printed += self._sandbox.take_printed()
        if self._receiver is None:
            self._pending.remove(self)
        deadline = self._sandbox.last_deadline
        assert deadline is not None
        elapsed = time.perf_counter() - deadline.began
        # The answer to a promise may have arrived long ago, while the model computed.
        seconds = _reported_seconds(answer, elapsed) if answer and self._logits_use != "given" else elapsed
        self._seconds += seconds
        # Measured by this process, so that a sandbox that understates its time is charged, too.
        cpu_seconds = deadline.cpu_seconds()
        if self.state is CallState.DEFERRED:
            # Nobody waits for it. Its answer may have arrived long ago.
            self._seconds_used += cpu_seconds
            # The time that it waited for a core counts: many calls at the lowest priority get less of the cores than a
            # share, and slow down the engine all the same.
            self._occupied += max(deadline.cpu_seconds_wanted(), seconds)
        else:
            seconds_used = deadline.seconds_used()
            self._seconds_used += seconds_used
            self._occupied += max(cpu_seconds, min(seconds, seconds_used))

    def _send_again(self, command: Command) -> None:
        """Send the rows, in the time that earlier exchanges of the call left."""
        timeout, backstop = self._timeout - self._seconds_used, self._backstop - self._seconds
        self._send_call(command, b"", max(0.0, timeout), max(0.0, backstop))

    def _send_call(self, command: Command, body: bytes, timeout: float, backstop: float) -> None:
        assert self._sandbox is not None
        self._command = command
        try:
            if self._logits is not None:
                self._copy_in(self._logits)
            self._sandbox.begin(command, body, timeout, backstop)
        except SandboxDied as died:
            self._fail(died)
            return
        if self.state is CallState.DEFERRED:
            self._sandbox.defer(backstop)
        elif self._has_low_priority:
            self._sandbox.lower_priority_of_call()
        self._pending.append(self)

    def _copy_in(self, logits: torch.Tensor) -> None:
        assert self._sandbox is not None
        rows = logits if self._has_all_rows else logits[self._rows_in_call]
        self._sandbox.logits[: len(self._rows_in_call)].copy_(rows)

    @property
    def _has_all_rows(self) -> bool:
        return len(self._rows_in_call) == self._num_rows

    def _take_answer(self, answer: Answer, body: bytes) -> None:
        """Decode the answer that ends the call."""
        assert self._sandbox is not None
        try:
            if answer is Answer.EDITS:
                began = time.thread_time()
                try:
                    self._edits = self._sandbox.decode_edits(body, len(self._rows_in_call))
                finally:
                    self._count(time.thread_time() - began)
            elif answer is Answer.FAULTS:
                reported = read_faults(body, self._processor, len(self._rows_in_call))
                self._faults |= {self._rows_in_call[row]: fault for row, fault in reported.items()}
        except ValueError:
            self._fail(self._sandbox.reject_answer())
        except SandboxDied as died:
            self._fail(died)
        else:
            self._enter(CallState.RECORDED if answer is Answer.EDITS else CallState.EDITED)

    def _count(self, seconds: float) -> None:
        """Count the server's own work on the answer like the time of the call: its sandbox decides how much that is."""
        self._seconds_used += seconds
        self._occupied += seconds

    def _apply_edits(self, rows: Sequence[int], edits: GroupEdits) -> None:
        assert self._logits is not None
        began = time.thread_time()
        apply_edits(self._logits, [(rows, edits)])
        self._count(time.thread_time() - began)

    def _copy_out(self) -> None:
        assert self._sandbox is not None
        assert self._logits is not None
        try:
            result = self._sandbox.logits[: len(self._rows_in_call)]
        except SandboxDied as died:
            self._give_fault(self._rows_in_call, died)
            return
        # Copied, because the sandbox may still write to the shared memory.
        if self._has_all_rows:
            self._logits.copy_(result)
        else:
            self._logits[self._rows_in_call] = result.to(self._logits.device)


def _reported_seconds(answer: tuple[Answer, bytes], elapsed: float) -> float:
    """Return a promised call's duration as reported by its sandbox, at most `elapsed`; `elapsed` without a report.

    Only for receipts and metrics: limits count the time that this process measures.
    """
    kind, body = answer
    if kind not in (Answer.EDITS, Answer.READ, Answer.DONE) or len(body) < SECONDS.size:
        return elapsed
    (seconds,) = SECONDS.unpack_from(body)
    return min(seconds, elapsed) if seconds >= 0.0 else 0.0  # NaN too
