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
from logitship.client.loading import instantiate, load_class
from logitship.client.processor import CustomLogitProcessor
from logitship.client.processor_string import PickledProcessor, SourceProcessor
from logitship.sampler.author_code import duplicate, edit
from logitship.sampler.class_description import ClassDescription, describe, to_bytes
from logitship.sampler.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams

from .protocol import HEADER, LONGEST_ANSWER, Answer, Kind, pack
from .row_retry import RowRetry

_Faults: TypeAlias = dict[int, ProcessorFault]


@dataclass
class Member:
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

    def fork(self, name: str, model: ModelView) -> Member:
        """A copy for a sequence that goes on by itself.

        Args:
            name: of the processor.

        Raises:
            ProcessorFault: something cannot be copied.
        """
        shared = (model.tokenizer, getattr(self.view, "sampling_params", None))
        return Member(*duplicate((self.params, self.view, self.output_ids), shared, name=name))


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
        self._members: dict[int, Member] = {}
        self._processor: CustomLogitProcessor | None = None
        self._name = ""
        self._retry = RowRetry(self._call)
        self._uncopied: dict[int, ProcessorFault] = {}
        self._failed: list[int] = []

    def handle(self, kind: int, body: bytes) -> tuple[Answer, bytes] | None:
        """Do what a message says. The answer, if it has one."""
        if kind == Kind.STEP:
            return self._step(body)
        if kind == Kind.RETRY:
            return self._try_again()
        if kind == Kind.ATTACH:
            self._attach(*marshal.loads(body))
        elif kind == Kind.FORK:
            self._fork(*marshal.loads(body))
        elif kind == Kind.DETACH:
            self._detach(marshal.loads(body))
        elif kind == Kind.LOAD:
            return self._load(*marshal.loads(body))
        return None

    def _load(self, form: str, *pieces: Any) -> tuple[Answer, bytes]:
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

    def _attach(
        self, handle: int, rid: str, params: dict[str, Any], prompt: bytes, output: bytes, sampling: dict[str, Any]
    ) -> None:
        view = RequestView(
            rid=rid,
            prompt_token_ids=memoryview(prompt).cast("q").tolist(),
            output_token_ids=memoryview(output).cast("q").tolist(),
            sampling_params=SamplingParams(**sampling),
            model=self._model,
        )
        self._members[handle] = Member({**params, "__req__": view}, view, view.output_ids)

    def _fork(self, source: int, target: int) -> None:
        if source in self._uncopied:
            self._uncopied[target] = self._uncopied[source]
            return
        try:
            self._members[target] = self._members[source].fork(self._name, self._model)
        except ProcessorFault as fault:
            self._uncopied[target] = fault.with_traceback(None)

    def _detach(self, handle: int) -> None:
        self._members.pop(handle, None)
        self._uncopied.pop(handle, None)

    def _step(self, body: bytes) -> tuple[Answer, bytes]:
        rows: list[tuple[int, list[int]]] = marshal.loads(body)
        for handle, new_tokens in rows:
            if handle not in self._uncopied:
                self._members[handle].extend(new_tokens)
        handles = [handle for handle, _ in rows]
        faults = self._edit(self._retry.attempt, handles)
        if faults is None:
            self._failed = handles
            return Answer.AGAIN, b""
        return _told(faults)

    def _try_again(self) -> tuple[Answer, bytes]:
        handles, self._failed = self._failed, []
        faults = self._edit(self._retry.retry, handles)
        assert faults is not None
        return _told(faults)

    def _edit(
        self, attempt: Callable[[torch.Tensor, Sequence[Member]], _Faults | None], handles: Sequence[int]
    ) -> _Faults | None:
        """Call the processor on the rows of the sequences that have a state; of the others, give the faults.

        Returns:
            What `attempt` does, by the rows of the call.
        """
        uncopied = {row: self._uncopied[handle] for row, handle in enumerate(handles) if handle in self._uncopied}
        members = [self._members[handle] for handle in handles if handle not in self._uncopied]
        if not uncopied:
            return attempt(self._logits[: len(members)], members)
        if not members:
            return uncopied
        places = [row for row in range(len(handles)) if row not in uncopied]
        logits = self._logits[places]
        faults = attempt(logits, members)
        if faults is None:
            return None
        self._logits[places] = logits
        return uncopied | {places[row]: fault for row, fault in faults.items()}

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


def _told(faults: Mapping[int, ProcessorFault]) -> tuple[Answer, bytes]:
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
