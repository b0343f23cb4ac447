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
        restart: a thread's result that starts the next sandbox on behalf of a step; None if there is none.
    """

    def __init__(self, digest: str, tenant: str, load_message: bytes) -> None:
        self.digest = digest
        self.tenant = tenant
        self.load_message = load_message
        self.lock = threading.Lock()
        self.sandbox: Sandbox | None = None
        self.class_description = ClassDescription("")
        self.restart: Future[None] | None = None

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
