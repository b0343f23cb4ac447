"""A call of a sandbox: the sequences that it is told of, the rows that go in, and what comes out."""

from __future__ import annotations

import marshal
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.executor import ExecutorSequence, RunOutcome
from logitship.sampler.sampling_params import SamplingParams

from .protocol import Answer, Command
from .sandbox import Sandbox, SandboxDied, wait_for_any
from .sandboxed_processor import SandboxedProcessor, read_faults


class SandboxRow:
    """A sequence whose processor runs in a sandbox.

    Args:
        handles: numbers that no other sequence has.

    Attributes:
        sequence: what the engine says of it.
        handle: its number in the sandbox.
        sandbox: the one that knows it; None until its first call.
        num_known: how many of its output tokens that one knows.
    """

    def __init__(self, sequence: ExecutorSequence, handles: Iterator[int]) -> None:
        self.sequence = sequence
        self._handles = handles
        self.handle = next(handles)
        self.sandbox: Sandbox | None = None
        self.num_known = 0

    def fork(self, output_token_ids: list[int]) -> SandboxRow:
        """See `ExecutorRow.fork`. Raises nothing: what cannot be copied is told with the other sequence's next call."""
        twin = SandboxRow(replace(self.sequence, output_token_ids=output_token_ids), self._handles)
        twin.sandbox, twin.num_known = self.sandbox, self.num_known
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.tell(Command.FORK, marshal.dumps((self.handle, twin.handle)))
        return twin

    def close(self) -> None:
        """See `ExecutorRow.close`."""
        if self.sandbox is not None and self.sandbox.alive:
            self.sandbox.tell(Command.DETACH, marshal.dumps(self.handle))
            self.sandbox.flush()  # there may be no other call: the sequence's state goes now

    def attach_message(self) -> bytes:
        """The body of ATTACH.

        Raises:
            ValueError: the parameters are not plain values.
        """
        sequence = self.sequence
        self.num_known = len(sequence.output_token_ids)
        return marshal.dumps(
            (
                self.handle,
                sequence.rid,
                dict(sequence.params),
                array("q", sequence.prompt_token_ids).tobytes(),
                array("q", sequence.output_token_ids).tobytes(),
                {name: getattr(sequence.sampling_params, name) for name in _SAMPLING_FIELDS},
            )
        )

    def new_tokens(self) -> list[int]:
        """The output tokens that the sandbox has not been told yet. From now on they count as told."""
        tokens = self.sequence.output_token_ids[self.num_known :]
        self.num_known += len(tokens)
        return tokens


def tokens_message(sandbox: Sandbox, rows: Sequence[SandboxRow]) -> bytes:
    """The body of STEP: empty if no row gained anything. Before it, GROUP is told if the rows are others.

    Args:
        rows: those of a call; the sandbox knows all of them.
    """
    handles = [row.handle for row in rows]
    if handles != sandbox.group:
        sandbox.tell(Command.GROUP, marshal.dumps(handles))
        sandbox.group = handles
    tokens = [row.new_tokens() for row in rows]
    return marshal.dumps(tokens) if any(tokens) else b""


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "processors")


class SandboxRun:
    """A call of a sandbox that was begun. See `Run`.

    Args:
        logits: float32 [rows, vocab]; edited in place when the call is finished.
        under_way: all runs that wait for an answer. Whoever waits for one serves them all, so that none misses its
            deadline because another does.
    """

    def __init__(
        self, processor: SandboxedProcessor, logits: torch.Tensor, timeout: float, under_way: list[SandboxRun]
    ) -> None:
        self._processor = processor
        self._logits = logits
        self._timeout = timeout
        self._under_way = under_way
        self._faults: dict[int, ProcessorFault] = {}
        self._sandbox: Sandbox | None = None
        self._places: list[int] = []
        self._answer: tuple[Answer, bytes] | None = None
        self._is_retry = False
        self._began = self._ended = time.perf_counter()

    def fail(self, places: Sequence[int], died: SandboxDied) -> None:
        """Give rows the fault of a sandbox that died."""
        self._faults |= dict.fromkeys(places, self._processor.fault(died))

    def begin(self, sandbox: Sandbox | SandboxDied, rows: Sequence[SandboxRow]) -> None:
        """Copy the rows into the region, and ask."""
        self._places = [
            place for place, row in enumerate(rows) if row.sandbox is sandbox or self._introduce(sandbox, row, place)
        ]
        if self._places:
            assert isinstance(sandbox, Sandbox)
            self._sandbox = sandbox
            # One whose step was given up before it was finished: asking again ends that call, and the sandbox.
            self._under_way[:] = [run for run in self._under_way if run._sandbox is not sandbox]
            self._ask(Command.STEP, tokens_message(sandbox, [rows[place] for place in self._places]), self._timeout)

    def _introduce(self, sandbox: Sandbox | SandboxDied, row: SandboxRow, place: int) -> bool:
        """Tell a sandbox of a sequence that it does not know. False if that is not possible: the row has a fault."""
        if row.sandbox is not None:  # its state died with another sandbox
            self.fail([place], row.sandbox.death)
        elif isinstance(sandbox, SandboxDied):
            self.fail([place], sandbox)
        else:
            try:
                sandbox.tell(Command.ATTACH, row.attach_message())
            except ValueError as error:
                self._faults[place] = self._processor.fault_of("exception", f"cannot be given its parameters: {error}")
            else:
                row.sandbox = sandbox
                return True
        return False

    def finish(self) -> RunOutcome:
        """See `Run.finish`."""
        if self in self._under_way:
            self.advance()  # often the kernel let the sandbox run in our place
        while self in self._under_way:
            runs = {run._sandbox: run for run in self._under_way if run._sandbox is not None}
            for sandbox in wait_for_any(runs):
                runs[sandbox].advance()
        if self._answer is not None:
            try:
                self._take(*self._answer)
            except SandboxDied as died:
                self.fail(self._places, died)
        return RunOutcome(self._ended - self._began, self._faults, self._is_retry)

    def advance(self) -> None:
        """Take note of the answer, if it is here. Never waits."""
        assert self._sandbox is not None
        try:
            answer = self._sandbox.advance()
        except SandboxDied as died:
            self._under_way.remove(self)
            self.fail(self._places, died)
            return
        if answer is None:
            return
        self._under_way.remove(self)
        self._ended = time.perf_counter()
        if answer[0] is Answer.AGAIN and not self._is_retry:
            self._is_retry = True
            self._ask(Command.RETRY, b"", self._began + self._timeout - self._ended)
        else:
            self._answer = answer

    def _ask(self, kind: Command, body: bytes, timeout: float) -> None:
        assert self._sandbox is not None
        try:
            self._copy_in()
            self._sandbox.begin(kind, body, timeout)
        except SandboxDied as died:
            self.fail(self._places, died)
        else:
            self._under_way.append(self)

    def _copy_in(self) -> None:
        assert self._sandbox is not None
        everything = len(self._places) == len(self._logits)
        rows = self._logits if everything else self._logits[self._places]
        self._sandbox.logits[: len(self._places)].copy_(rows)

    def _take(self, answer: Answer, body: bytes) -> None:
        assert self._sandbox is not None
        if answer is Answer.FAULTS:
            try:
                told = read_faults(body, self._processor, len(self._places))
            except ValueError:
                raise self._sandbox.reject_answer() from None
            self._faults |= {self._places[row]: fault for row, fault in told.items()}
        elif answer is not Answer.DONE:
            raise self._sandbox.reject_answer()
        self._copy_out()

    def _copy_out(self) -> None:
        assert self._sandbox is not None
        result = self._sandbox.logits[: len(self._places)]
        # A copy: from here on, what the sandbox does to the region changes nothing.
        if len(self._places) == len(self._logits):
            self._logits.copy_(result)
        else:
            self._logits[self._places] = result.to(self._logits.device)
