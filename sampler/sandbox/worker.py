"""The worker in a sandbox: loads one processor, and calls it on the rows in the shared memory.

When `serve` runs, the kernel already confines this process. Nothing in this module is a security boundary: a processor
can replace all of it, and the server does not trust its answers.
"""

from __future__ import annotations

import faulthandler
import marshal
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, TypeAlias

import orjson
import torch

from logitship.client.author_errors import error_message, error_text
from logitship.client.author_hints import sandbox_hint
from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.loading import instantiate_prepared, load_class
from logitship.sampler.author_code.calls import duplicate, edit
from logitship.sampler.edits.edit_codec import VectorSender, encode
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.processors.class_description import ClassDescription, describe, to_bytes
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.promised_logits.promise_scan import reason_against_promises
from logitship.sampler.promised_logits.promised_memory import RecentCalls
from logitship.sampler.sampling_params import SamplingParams

from .printed_text import PrintedText
from .promised_call import PromisedCall
from .protocol import (
    DUMP_SIGNAL,
    EDITS_HEADER,
    HEADER,
    MAX_ANSWER,
    MAX_PRINTED,
    SECONDS,
    Answer,
    Command,
    pack,
    shipped_string,
)
from .row_retry import RowRetry

_Answer: TypeAlias = tuple[Answer, bytes]
_Faults: TypeAlias = dict[int, ProcessorFault]


@dataclass
class SequenceState:
    """A sequence of a processor.

    Attributes:
        params: the parameters that the processor receives for its row, `__req__` included.
        view: the same `__req__`.
        output_ids: the original list of output tokens of the view.
        restorable, params_copy: see `GroupMember`.
    """

    params: dict[str, Any]
    view: RequestView
    output_ids: list[int]
    restorable: bool = True
    params_copy: dict[str, Any] | None = None

    def extend(self, tokens: list[int]) -> None:
        """Append new output tokens."""
        if tokens:
            self.output_ids.extend(tokens)
            self.view.output_ids = self.output_ids  # the processor may have replaced or deleted it

    def fork(self, name: str, model: ModelView) -> SequenceState:
        """Return a copy for a forked sequence.

        Args:
            name: the processor's name, for the fault.
            model: its tokenizer is shared with the copy.

        Raises:
            ProcessorFault: something cannot be copied.
        """
        shared = (model.tokenizer, getattr(self.view, "sampling_params", None))
        return SequenceState(*duplicate((self.params, self.view, self.output_ids), shared, name=name))


@dataclass
class CallGroup:
    """The sequences of the rows of a call, until the next GROUP.

    Attributes:
        members: the sequences that have a state.
        logits: float32 [members, vocab], a view of the shared memory; None if some rows have no state.
        member_rows: the members' rows.
        fork_faults: faults of the other rows, whose fork failed.
    """

    members: list[SequenceState]
    logits: torch.Tensor | None
    member_rows: list[int]
    fork_faults: _Faults


class Worker:
    """One processor and its sequences.

    Args:
        logits: float32 [max_rows, vocab], the shared memory.
        model: the model properties that a processor can read.
        names: objects that shipped classes may refer to by name, see `load_class`.

    Attributes:
        receive_rows: sends READ with this body, and returns once the rows are in the shared memory.
    """

    def __init__(self, logits: torch.Tensor, model: ModelView, names: Mapping[tuple[str, str], Any]) -> None:
        self._logits = logits
        self._model = model
        self._names = names
        self._members: dict[int, SequenceState] = {}
        self._processor: CustomLogitProcessor | None = None
        self._name = ""
        self._retry = RowRetry(self._call)
        self._fork_faults: dict[int, ProcessorFault] = {}
        self._group = CallGroup([], None, [], {})
        self._recent = RecentCalls()
        self._vectors = VectorSender()
        self._dense_reason = ""
        self._stopwatch = Stopwatch()
        self.receive_rows: Callable[[bytes], None] = _no_rows
        self._handlers: dict[int, Callable[[bytes], _Answer | None]] = {
            Command.LOAD: self._load,
            Command.ATTACH: self._attach,
            Command.FORK: self._fork,
            Command.DETACH: self._detach,
            Command.GROUP: self._set_group,
            Command.STEP: self._step,
            Command.RETRY: self._retry_rows,
            Command.PROMISE: self._promise,
        }

    def handle(self, command: int, body: bytes) -> _Answer | None:
        """Execute a command. Return its answer, if it has one."""
        return self._handlers[command](body)

    def _load(self, body: bytes) -> _Answer:
        try:
            description = self.use(load_class(shipped_string(body), self._names))
        except ProcessorLoadError as error:
            return Answer.REFUSED, _reason(error).encode()
        # Author code may raise anything.
        except BaseException as error:  # noqa: BLE001  # boundary: author code
            return Answer.REFUSED, f"the processor could not be loaded: {error_text(error)}".encode()
        return Answer.LOADED, to_bytes(description)

    def use(self, cls: type[CustomLogitProcessor]) -> ClassDescription:
        """Instantiate and prepare the processor. Runs author code, which may raise anything."""
        self._processor = instantiate_prepared(cls, self._model.tokenizer, self._model.vocab_size)
        description = describe(cls)
        self._name = description.name
        self._dense_reason = reason_against_promises(cls)
        return replace(description, dense_reason=self._dense_reason)

    def _attach(self, body: bytes) -> None:
        handle, rid, params, prompt, output, sampling = marshal.loads(body)
        view = RequestView(
            rid=rid,
            prompt_token_ids=memoryview(prompt).cast("q").tolist(),
            output_token_ids=memoryview(output).cast("q").tolist(),
            sampling_params=SamplingParams(**sampling),
            model=self._model,
        )
        self._members[handle] = SequenceState({**params, "__req__": view}, view, view.output_ids)

    def _fork(self, body: bytes) -> None:
        source, target = marshal.loads(body)
        if source in self._fork_faults:
            self._fork_faults[target] = self._fork_faults[source]
            return
        try:
            self._members[target] = self._members[source].fork(self._name, self._model)
        except ProcessorFault as fault:
            self._fork_faults[target] = fault.with_traceback(None)

    def _detach(self, body: bytes) -> None:
        handle = marshal.loads(body)
        gone = self._members.pop(handle, None)
        self._fork_faults.pop(handle, None)
        if any(member is gone for member in self._group.members):
            self._group = CallGroup([], None, [], {})  # free its state now; the next call is for other rows

    def _set_group(self, body: bytes) -> None:
        handles = marshal.loads(body)
        member_rows = [row for row, handle in enumerate(handles) if handle not in self._fork_faults]
        members = [self._members[handles[row]] for row in member_rows]
        fork_faults = {
            row: self._fork_faults[handle] for row, handle in enumerate(handles) if handle in self._fork_faults
        }
        self._group = CallGroup(
            members, None if fork_faults else self._logits[: len(members)], member_rows, fork_faults
        )

    def _step(self, body: bytes) -> _Answer:
        self._extend(body)
        return self._edit_rows()

    def _promise(self, body: bytes) -> _Answer:
        """Call the processor before the logits exist."""
        self._stopwatch.start()
        self._extend(body)
        group = self._group
        if group.logits is None or self._dense_reason or self._retry.is_row_by_row:
            self._receive()
            return self._edit_rows()
        call = PromisedCall(group.logits, self._receive, self._recent)
        faults = self._retry.attempt(call, group.members)
        self._dense_reason = call.dense_reason
        if faults is None and call.is_received:
            return Answer.AGAIN, b""
        if faults is None:
            self._receive()
            faults = self._retried()
            if not faults:
                self._dense_reason = "it fails before its logits exist"
            return _faults_answer(faults)
        if faults or call.is_received:
            return _faults_answer(faults)
        return self._edits_answer(call.edits) if call.edits is not None else self._dense_answer()

    def _dense_answer(self) -> _Answer:
        """Answer a call that returned a tensor of its own, which is now in the shared memory."""
        return Answer.DONE, SECONDS.pack(self._stopwatch.seconds())

    def _edits_answer(self, edits: EditLog) -> _Answer:
        encoded = encode(edits, self._vectors)
        if len(encoded) > self._logits.nbytes:
            self._vectors = VectorSender()  # those in `encoded` are not sent
            self._receive()
            assert self._group.logits is not None
            edits.apply_to(self._group.logits)
            return Answer.DONE, b""
        if EDITS_HEADER.size + len(encoded) <= MAX_ANSWER:
            return Answer.EDITS, EDITS_HEADER.pack(self._stopwatch.seconds(), 0) + encoded
        shared = self._logits.view(-1).view(torch.uint8)[: len(encoded)]
        shared.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        return Answer.EDITS, EDITS_HEADER.pack(self._stopwatch.seconds(), len(encoded))

    def _receive(self) -> None:
        """Wait until the rows are in the shared memory."""
        self.receive_rows(SECONDS.pack(self._stopwatch.seconds()))

    def _extend(self, body: bytes) -> None:
        """Append the new tokens of the rows."""
        if body:
            tokens: list[list[int]] = marshal.loads(body)
            group = self._group
            for member, row in zip(group.members, group.member_rows, strict=True):
                member.extend(tokens[row])

    def _edit_rows(self) -> _Answer:
        faults = self._edit(self._retry.attempt)
        return (Answer.AGAIN, b"") if faults is None else _faults_answer(faults)

    def _retry_rows(self, _: bytes) -> _Answer:
        return _faults_answer(self._retried())

    def _retried(self) -> _Faults:
        """Call the processor row by row after a failed call."""
        faults = self._edit(self._retry.retry)
        assert faults is not None
        return faults

    def _edit(self, attempt: Callable[[torch.Tensor, Sequence[SequenceState]], _Faults | None]) -> _Faults | None:
        """Call the processor on the rows that have a state, and add the faults of those whose fork failed.

        Returns:
            The faults by row of the call; None if `attempt` returns None.
        """
        group = self._group
        if group.logits is not None:
            return attempt(group.logits, group.members)
        if not group.members:
            return group.fork_faults
        logits = self._logits[group.member_rows]
        faults = attempt(logits, group.members)
        if faults is None:
            return None
        self._logits[group.member_rows] = logits
        return group.fork_faults | {group.member_rows[row]: fault for row, fault in faults.items()}

    def _call(self, logits: torch.Tensor | PromisedCall, params: list[dict[str, Any]]) -> None:
        processor = self._processor
        assert processor is not None
        function = partial(_call_processor, processor, params)
        if isinstance(logits, PromisedCall):
            logits.edit(function, name=self._name, shipped_class=type(processor))
        else:
            edit(function, logits, name=self._name, shipped_class=type(processor), in_sandbox=True)


def _call_processor(processor: CustomLogitProcessor, params: list[dict[str, Any]], logits: torch.Tensor) -> object:
    return processor(logits, params)


def _reason(error: ProcessorLoadError) -> str:
    """Return why a class cannot be loaded, with advice if it tried what a sandbox cannot do."""
    first, newline, rest = error_message(error).partition("\n")
    hint = "" if error.__cause__ is None else sandbox_hint(error.__cause__)
    return f"{first} ({hint}){newline}{rest}" if hint else f"{first}{newline}{rest}"


def _no_rows(body: bytes) -> None:
    raise AssertionError("there is no server to receive rows from")


class Stopwatch:
    """Measures the time of a call."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Return the time since the start."""
        return time.perf_counter() - self._began


def serve(connection: int, worker: Worker) -> None:
    """Execute the server's commands until it closes the connection.

    Args:
        connection: file descriptor of a stream socket.
        worker: executes the commands.
    """
    faulthandler.register(DUMP_SIGNAL, connection, all_threads=False)
    with open(connection, "rb", closefd=False) as stream:  # buffered: one system call per message
        server = ServerConnection(connection, stream)
        sys.stdout = sys.stderr = server.printed
        worker.receive_rows = server.receive_rows
        while True:
            answer = worker.handle(*server.next())
            if answer is not None:
                server.answer(*answer)


class ServerConnection:
    """The worker's end of the connection to the server.

    Args:
        connection: file descriptor of a stream socket.
        stream: reads from it.

    Attributes:
        printed: sends what is written to it.
    """

    def __init__(self, connection: int, stream: BinaryIO) -> None:
        self._connection = connection
        self._stream = stream
        self._number = 0
        self.printed = PrintedText(self._send_printed)
        self._postponed: deque[tuple[int, int, bytes]] = deque()

    def next(self) -> tuple[int, bytes]:
        """Return the next command and its body. The process ends with the connection."""
        command, number, body = self._postponed.popleft() if self._postponed else self._receive()
        self._begin(number)
        return command, body

    def answer(self, answer: Answer, body: bytes) -> None:
        """Answer the last command."""
        self.printed.flush()
        _write(self._connection, pack(answer, self._number, body[:MAX_ANSWER]))
        self._number = 0  # what is printed from now on, by a profile function for example, belongs to the next call

    def receive_rows(self, body: bytes) -> None:
        """Send READ, and return once the rows are there. Commands for later calls that arrive before are postponed."""
        self.answer(Answer.READ, body)
        while True:
            message = self._receive()
            if message[0] == Command.ROWS:
                self._begin(message[1])
                return
            self._postponed.append(message)

    def _begin(self, number: int) -> None:
        """Begin a command, in which some more may be printed."""
        self._number = number
        self.printed.begin(MAX_PRINTED)

    def _send_printed(self, body: bytes) -> bool:
        """Send text to the server, which only expects it during calls. Return whether it was sent."""
        if self._number:
            _write(self._connection, pack(Answer.PRINTED, self._number, body))
        return self._number != 0

    def _receive(self) -> tuple[int, int, bytes]:
        command, number, size = HEADER.unpack(_read(self._stream, HEADER.size))
        return command, number, _read(self._stream, size)


def _faults_answer(faults: Mapping[int, ProcessorFault]) -> _Answer:
    return (Answer.FAULTS, _faults_json(faults)) if faults else (Answer.DONE, b"")


def _faults_json(faults: Mapping[int, ProcessorFault]) -> bytes:
    """Return `[[rows, kind, message, traceback], …]`, cut to `MAX_ANSWER`."""
    rows_of: dict[ProcessorFault, list[int]] = {}
    for row, fault in faults.items():
        rows_of.setdefault(fault, []).append(row)
    # JSON takes up to six bytes per character. With hundreds of faults, no text is left.
    max_chars = max(0, MAX_ANSWER // len(rows_of) - 200) // 6 // 2
    return orjson.dumps(
        [
            [rows, fault.kind, fault.message[:max_chars], fault.traceback[max(0, len(fault.traceback) - max_chars) :]]
            for fault, rows in rows_of.items()
        ]
    )


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        os._exit(0)  # the server is gone; skip the author's atexit functions
    return data


def _write(connection: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(connection, view) :]
