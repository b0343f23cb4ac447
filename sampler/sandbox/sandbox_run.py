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

from logitship.client.errors import ProcessorFault
from logitship.client.scrub import scrub
from logitship.sampler.processors.executor import ClassDescription, ExecutorSequence, RunOutcome
from logitship.sampler.sampling_params import SANDBOXED_FIELDS

from .deadline import DEFERRED_BACKSTOP
from .protocol import Answer, Command
from .sandbox import Sandbox, SandboxDied, wait_for_any

LONGEST_TEXT = 8192
"""Characters kept of a message or traceback from a sandbox."""


class SandboxedProcessor:
    """A processor and the sandbox it runs in; a sandbox that died is replaced.

    Attributes:
        digest: the processor's identity.
        tenant: the tenant it belongs to.
        load_message: the body of LOAD.
        lock: held while a sandbox is started.
        sandbox: the sandbox that was started last; None before the first.
        class_description: description of the class. It comes from the sandbox, so it is not trusted.
    """

    def __init__(self, digest: str, tenant: str, load_message: bytes) -> None:
        self.digest = digest
        self.tenant = tenant
        self.load_message = load_message
        self.lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self.class_description = ClassDescription("")

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
        return self.fault_of(died.kind, died.reason)

    def fault_of(self, kind: str, reason: str) -> ProcessorFault:
        """Return a fault of this processor. `reason` continues a sentence that begins with the processor's name."""
        return self.make_fault(kind, f"processor {self.name} {reason}", "")

    def make_fault(self, kind: str, message: str, traceback: str) -> ProcessorFault:
        """Return a fault of this processor with this message and traceback."""
        return ProcessorFault(message, digest=self.digest, name=self.name, kind=kind, traceback=traceback)


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
                fault = processor.make_fault(kind, scrub(message)[:LONGEST_TEXT], scrub(traceback)[-LONGEST_TEXT:])
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
        """See `ExecutorRow.fork`. Raises nothing: a failed copy is reported by the next call of the new sequence."""
        copy = SandboxRow(replace(self.sequence, output_token_ids=output_token_ids), self._handles)
        copy.sandbox, copy.num_sent = self.sandbox, self.num_sent
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.enqueue(Command.FORK, marshal.dumps((self.handle, copy.handle)))
        return copy

    def close(self) -> None:
        """See `ExecutorRow.close`."""
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
    """A `Run` in a sandbox.

    Args:
        logits: float32 [rows, vocab]; edited in place by `finish`.
        timeout: seconds that the call may take, see `CallDeadline`.
        backstop: wall-clock seconds that it may take at most.
        pending: all runs that wait for an answer. `finish` serves all of them while it waits for its own, so that no
            run misses its deadline because of another.
        use_credit: takes the seconds of the first call in a sandbox, which has a deadline of its own.
    """

    def __init__(
        self,
        processor: SandboxedProcessor,
        logits: torch.Tensor,
        timeout: float,
        backstop: float,
        pending: list[SandboxRun],
        use_credit: Callable[[float], None] | None = None,
    ) -> None:
        self._processor = processor
        self._logits = logits
        self._timeout = timeout
        self._backstop = backstop
        self._pending = pending
        self._use_credit = use_credit
        self._faults: dict[int, ProcessorFault] = {}
        self._sandbox: Sandbox | None = None
        self._rows_in_call: list[int] = []
        self._answer: tuple[Answer, bytes] | None = None
        self._is_retry = self._is_deferred = False
        self._began = self._ended = time.perf_counter()

    def fail(self, rows: Sequence[int], died: SandboxDied) -> None:
        """Give rows the fault of a sandbox that died."""
        self._faults |= dict.fromkeys(rows, self._processor.fault_of_death(died))

    def begin(self, sandbox: Sandbox | SandboxDied, rows: Sequence[SandboxRow]) -> None:
        """Attach new sequences, copy the rows into the shared memory, and send the call."""
        self._rows_in_call = [
            index for index, row in enumerate(rows) if row.sandbox is sandbox or self._attach(sandbox, row, index)
        ]
        if self._rows_in_call:
            assert isinstance(sandbox, Sandbox)
            self._sandbox = sandbox
            # A run of an aborted step may still be pending here. Beginning another call kills its sandbox.
            self._pending[:] = [run for run in self._pending if run._sandbox is not sandbox]
            message = step_message(sandbox, [rows[index] for index in self._rows_in_call])
            self._send_call(Command.STEP, message, self._timeout, self._backstop)

    def _attach(self, sandbox: Sandbox | SandboxDied, row: SandboxRow, index: int) -> bool:
        """Attach a new sequence to a sandbox. Return False if that is impossible; the row then has a fault."""
        if row.sandbox is not None:  # its state died with another sandbox
            self.fail([index], row.sandbox.death)
        elif isinstance(sandbox, SandboxDied):
            self.fail([index], sandbox)
        else:
            try:
                sandbox.enqueue(Command.ATTACH, row.attach_message())
            except ValueError as error:
                self._faults[index] = self._processor.fault_of("exception", f"cannot be given its parameters: {error}")
            else:
                row.sandbox = sandbox
                return True
        return False

    def wait(self, timeout: float) -> bool:
        """See `Run.wait`."""
        if self in self._pending:
            self.advance()  # often the answer is already here, because the sandbox ran on this core
        until = time.perf_counter() + timeout
        while self in self._pending and (left := until - time.perf_counter()) > 0:
            runs = {run._sandbox: run for run in self._pending if run._sandbox is not None}
            for sandbox in wait_for_any(runs, left):
                runs[sandbox].advance()
        return self not in self._pending

    def defer(self, logits: torch.Tensor) -> None:
        """See `Run.defer`."""
        self._logits = logits
        self._is_deferred = True
        self._backstop = DEFERRED_BACKSTOP * self._timeout
        if self._sandbox is not None and self in self._pending:
            self._sandbox.defer(self._backstop)

    def finish(self) -> RunOutcome:
        """See `Run.finish`."""
        self.wait(math.inf)
        if self._answer is not None:
            try:
                self._apply_answer(*self._answer)
            except SandboxDied as died:
                self.fail(self._rows_in_call, died)
        seconds = self._ended - self._began
        if self._use_credit is None:
            return RunOutcome(seconds, self._faults, self._is_retry, seconds)
        self._use_credit(seconds)
        return RunOutcome(seconds, self._faults, self._is_retry)

    def advance(self) -> None:
        """Receive the answer if it has arrived. Never blocks."""
        assert self._sandbox is not None
        try:
            answer = self._sandbox.advance()
        except SandboxDied as died:
            self._pending.remove(self)
            self._ended = time.perf_counter()
            self.fail(self._rows_in_call, died)
            return
        if answer is None:
            return
        self._pending.remove(self)
        self._ended = time.perf_counter()
        if answer[0] is Answer.AGAIN and not self._is_retry:
            self._is_retry = True
            self._send_call(Command.RETRY, b"", *self._remaining())
        else:
            self._answer = answer

    def _remaining(self) -> tuple[float, float]:
        """Return the timeout and the backstop that the first attempt left for the second."""
        assert self._sandbox is not None
        assert self._sandbox.last_deadline is not None
        timeout = self._timeout - self._sandbox.last_deadline.cpu_seconds()
        return max(0.0, timeout), max(0.0, self._backstop - (self._ended - self._began))

    def _send_call(self, command: Command, body: bytes, timeout: float, backstop: float) -> None:
        assert self._sandbox is not None
        try:
            self._copy_in()
            self._sandbox.begin(command, body, timeout, backstop)
        except SandboxDied as died:
            self.fail(self._rows_in_call, died)
            return
        if self._is_deferred:
            self._sandbox.defer(backstop)
        self._pending.append(self)

    def _copy_in(self) -> None:
        assert self._sandbox is not None
        all_rows = len(self._rows_in_call) == len(self._logits)
        rows = self._logits if all_rows else self._logits[self._rows_in_call]
        self._sandbox.logits[: len(self._rows_in_call)].copy_(rows)

    def _apply_answer(self, answer: Answer, body: bytes) -> None:
        assert self._sandbox is not None
        if answer is Answer.FAULTS:
            try:
                reported = read_faults(body, self._processor, len(self._rows_in_call))
            except ValueError:
                raise self._sandbox.reject_answer() from None
            self._faults |= {self._rows_in_call[row]: fault for row, fault in reported.items()}
        elif answer is not Answer.DONE:
            raise self._sandbox.reject_answer()
        self._copy_out()

    def _copy_out(self) -> None:
        assert self._sandbox is not None
        result = self._sandbox.logits[: len(self._rows_in_call)]
        # Copied, because the sandbox may still write to the shared memory.
        if len(self._rows_in_call) == len(self._logits):
            self._logits.copy_(result)
        else:
            self._logits[self._rows_in_call] = result.to(self._logits.device)
