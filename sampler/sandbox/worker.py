"""What runs in a sandbox: loads one processor, and calls it on the rows that the server puts into the shared region.

By the time `serve` runs, the kernel refuses this process everything but arithmetic. Nothing here protects anybody from
the processor: it could replace all of this module. It is here for the honest ones, and the server believes none of it.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import orjson
import torch

from logitship.client.author_errors import error_message, error_text
from logitship.client.errors import ProcessorFault, ProcessorLoadError
from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.loading import instantiate, load_class
from logitship.client.serialization.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.processors.author_code import duplicate, edit
from logitship.sampler.processors.class_description import ClassDescription, describe, to_bytes
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams

from .protocol import HEADER, LONGEST_ANSWER, Answer, Command, pack
from .row_retry import RowRetry

_Answer: TypeAlias = tuple[Answer, bytes]
_Faults: TypeAlias = dict[int, ProcessorFault]


@dataclass
class SequenceState:
    """A sequence whose rows the processor edits.

    Attributes:
        params: what the processor receives for its row, `__req__` included.
        output_ids: the view's own list of output tokens.
        restorable, kept: see `GroupMember`.
    """

    params: dict[str, Any]
    view: RequestView
    output_ids: list[int]
    restorable: bool = True
    kept: dict[str, Any] | None = None

    def extend(self, tokens: list[int]) -> None:
        """Take over new output tokens."""
        if tokens:
            self.output_ids.extend(tokens)
            self.view.output_ids = self.output_ids  # it may have been replaced or deleted

    def fork(self, name: str, model: ModelView) -> SequenceState:
        """A copy for a sequence that goes on by itself.

        Args:
            name: of the processor.

        Raises:
            ProcessorFault: something cannot be copied.
        """
        shared = (model.tokenizer, getattr(self.view, "sampling_params", None))
        return SequenceState(*duplicate((self.params, self.view, self.output_ids), shared, name=name))


@dataclass
class CallGroup:
    """The sequences that the rows of a call belong to, of those calls until others are named.

    Attributes:
        members: those whose rows the processor edits.
        logits: float32 [members, vocab], the rows of the region, if these are the members' rows; None if some of them
            are not.
        places: of the members, among the rows.
        uncopied: the faults of the others, which have no state, by row.
    """

    members: list[SequenceState]
    logits: torch.Tensor | None
    places: list[int]
    uncopied: _Faults


class Worker:
    """One processor, and the sequences that carry it.

    Args:
        logits: float32 [max_rows, vocab], the shared region.
        model: what the processor may know of the model.
        names: what shipped classes may refer to by name, see `load_class`.
    """

    def __init__(self, logits: torch.Tensor, model: ModelView, names: Mapping[tuple[str, str], Any]) -> None:
        self._logits = logits
        self._model = model
        self._names = names
        self._members: dict[int, SequenceState] = {}
        self._processor: CustomLogitProcessor | None = None
        self._name = ""
        self._retry = RowRetry(self._call)
        self._uncopied: dict[int, ProcessorFault] = {}
        self._group = CallGroup([], None, [], {})
        self._handlers: dict[int, Callable[[bytes], _Answer | None]] = {
            Command.LOAD: self._load,
            Command.ATTACH: self._attach,
            Command.FORK: self._fork,
            Command.DETACH: self._detach,
            Command.GROUP: self._regroup,
            Command.STEP: self._step,
            Command.RETRY: self._try_again,
        }

    def handle(self, kind: int, body: bytes) -> _Answer | None:
        """Do what a message says. The answer, if it has one."""
        return self._handlers[kind](body)

    def _load(self, body: bytes) -> _Answer:
        form, *pieces = marshal.loads(body)
        string = PickledProcessor(*pieces) if form == "pickled" else SourceProcessor(*pieces)
        try:
            described = self.use(load_class(string, self._names))
        except ProcessorLoadError as error:
            return Answer.REFUSED, error_message(error).encode()
        except BaseException as error:  # noqa: BLE001  # the author's code may raise anything
            return Answer.REFUSED, f"the processor could not be loaded: {error_text(error)}".encode()
        return Answer.LOADED, to_bytes(described)

    def use(self, cls: type[CustomLogitProcessor]) -> ClassDescription:
        """Make the processor. Runs its author's code, which may raise anything."""
        self._processor = instantiate(cls)
        described = describe(cls)
        self._name = described.name
        return described

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
        if source in self._uncopied:
            self._uncopied[target] = self._uncopied[source]
            return
        try:
            self._members[target] = self._members[source].fork(self._name, self._model)
        except ProcessorFault as fault:
            self._uncopied[target] = fault.with_traceback(None)

    def _detach(self, body: bytes) -> None:
        handle = marshal.loads(body)
        gone = self._members.pop(handle, None)
        self._uncopied.pop(handle, None)
        if any(member is gone for member in self._group.members):
            self._group = CallGroup([], None, [], {})  # its state goes now; the next call is for other rows

    def _regroup(self, body: bytes) -> None:
        handles = marshal.loads(body)
        places = [row for row, handle in enumerate(handles) if handle not in self._uncopied]
        members = [self._members[handles[row]] for row in places]
        uncopied = {row: self._uncopied[handle] for row, handle in enumerate(handles) if handle in self._uncopied}
        self._group = CallGroup(members, None if uncopied else self._logits[: len(members)], places, uncopied)

    def _step(self, body: bytes) -> _Answer:
        if body:
            tokens: list[list[int]] = marshal.loads(body)
            group = self._group
            for member, row in zip(group.members, group.places, strict=True):
                member.extend(tokens[row])
        faults = self._edit(self._retry.attempt)
        return (Answer.AGAIN, b"") if faults is None else _told(faults)

    def _try_again(self, _: bytes) -> _Answer:
        faults = self._edit(self._retry.retry)
        assert faults is not None
        return _told(faults)

    def _edit(self, attempt: Callable[[torch.Tensor, Sequence[SequenceState]], _Faults | None]) -> _Faults | None:
        """Call the processor on the rows of the sequences that have a state; of the others, give the faults.

        Returns:
            What `attempt` does, by the rows of the call.
        """
        group = self._group
        if group.logits is not None:
            return attempt(group.logits, group.members)
        if not group.members:
            return group.uncopied
        logits = self._logits[group.places]
        faults = attempt(logits, group.members)
        if faults is None:
            return None
        self._logits[group.places] = logits
        return group.uncopied | {group.places[row]: fault for row, fault in faults.items()}

    def _call(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> None:
        processor = self._processor
        assert processor is not None
        edit(lambda given: processor(given, params), logits, name=self._name, shipped_class=type(processor))


def serve(connection: int, worker: Worker) -> None:
    """Answer the server until it closes the connection.

    Args:
        connection: file descriptor of a stream socket.
    """
    with open(connection, "rb", closefd=False) as stream:  # buffered: a message takes one system call
        while True:
            kind, number, size = HEADER.unpack(_read(stream, HEADER.size))
            answer = worker.handle(kind, _read(stream, size))
            if answer is not None:
                _write(connection, pack(answer[0], number, answer[1][:LONGEST_ANSWER]))


def _told(faults: Mapping[int, ProcessorFault]) -> _Answer:
    return (Answer.FAULTS, _faults_json(faults)) if faults else (Answer.DONE, b"")


def _faults_json(faults: Mapping[int, ProcessorFault]) -> bytes:
    """[[rows, kind, message, traceback], …], cut to what an answer may hold."""
    rows_of: dict[ProcessorFault, list[int]] = {}
    for row, fault in faults.items():
        rows_of.setdefault(fault, []).append(row)
    # JSON may need six bytes for a character. Of hundreds of faults, no text is left.
    room = max(0, LONGEST_ANSWER // len(rows_of) - 200) // 6 // 2
    return orjson.dumps(
        [
            [rows, fault.kind, fault.message[:room], fault.traceback[max(0, len(fault.traceback) - room) :]]
            for fault, rows in rows_of.items()
        ]
    )


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        os._exit(0)  # the server is gone: nothing is left to do, least of all the author's atexit functions
    return data


def _write(connection: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(connection, view) :]
