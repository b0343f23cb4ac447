"""A processor that runs in sandboxes, and its faults."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import orjson

from logitship.client.errors import ProcessorFault
from logitship.client.scrub import scrub
from logitship.sampler.processors.class_description import ClassDescription

from .sandbox import Sandbox, SandboxDied

LONGEST_TEXT = 8192
"""Characters of a message or a traceback of a sandbox's that are kept."""


class SandboxedProcessor:
    """A processor and where it runs: in one sandbox after the other, if it kills them.

    Attributes:
        digest: the processor's identity.
        tenant: whose it is.
        load_message: the body of LOAD.
        lock: held while a sandbox is started.
        sandbox: the last one that was started; None until there was one.
        described: what its class says of itself, as far as its sandbox is to be believed.
        restart: a thread that starts the next one, on behalf of a step.
    """

    def __init__(self, digest: str, tenant: str, load_message: bytes) -> None:
        self.digest = digest
        self.tenant = tenant
        self.load_message = load_message
        self.lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self.described = ClassDescription("")
        self.restart: Future[None] | None = None

    @property
    def name(self) -> str:
        """The class's name."""
        return self.described.name

    @property
    def current_sandbox(self) -> Sandbox:
        """Its sandbox, after the first was started."""
        assert self.sandbox is not None
        return self.sandbox

    def fault(self, died: SandboxDied) -> ProcessorFault:
        """What its rows are told of the end of its sandbox."""
        return self.fault_of(died.kind, died.reason)

    def fault_of(self, kind: str, reason: str) -> ProcessorFault:
        """A fault of this processor, for a reason that goes on a sentence."""
        return self.make_fault(kind, f"processor {self.name} {reason}", "")

    def make_fault(self, kind: str, message: str, traceback: str) -> ProcessorFault:
        """A fault of this processor, in the words of its sandbox."""
        return ProcessorFault(message, digest=self.digest, name=self.name, kind=kind, traceback=traceback)


def read_faults(body: bytes, processor: SandboxedProcessor, num_rows: int) -> dict[int, ProcessorFault]:
    """The faults that a sandbox tells of, by row of the call.

    Raises:
        ValueError: it is not what a worker tells.
    """
    told = orjson.loads(body)  # its error is a ValueError too
    if not isinstance(told, list) or not told:
        raise ValueError("no list of faults")
    faults: dict[int, ProcessorFault] = {}
    for each in told:
        match each:
            case [[*rows], "exception" | "bad_result" | "uncopyable" as kind, str(message), str(traceback)] if all(
                type(row) is int and 0 <= row < num_rows for row in rows
            ):
                fault = processor.make_fault(kind, scrub(message)[:LONGEST_TEXT], scrub(traceback)[-LONGEST_TEXT:])
                faults |= dict.fromkeys(rows, fault)
            case _:
                raise ValueError("not a fault")
    return faults
