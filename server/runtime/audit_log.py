"""The audit log: which processors a process has run, of whom, and how each request ended. JSON, a line a request."""

from __future__ import annotations

import atexit
import json
import logging
import queue
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from typing import Any

from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString

from .tracked_request import TrackedRequest

FINISHED = "finished"
"""The end of a request that no processor ended; otherwise the fault's kind."""


class AuditLog:
    """Appends lines to a file, in a thread: a step does not wait for the disk. May be rotated while it is open.

    Args:
        path: the file.

    Raises:
        ValueError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        try:
            handler = WatchedFileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handler = QueueHandler(lines)
        self._listener = QueueListener(lines, handler)
        self._listener.start()
        atexit.register(self.close)

    def add(self, request: TrackedRequest) -> None:
        """Add a request that has ended."""
        fault = request.fault
        ran = [
            {"name": use.processor.name, "digest": use.processor.digest, "calls": use.receipt.steps}
            for use in request.uses
        ]
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "tenant": request.tenant,
            "request": request.rid,
            "processors": ran or [_described(each.string) for each in request.requested],
            "end": FINISHED if fault is None else fault.kind,
        }
        if fault is not None:
            line["error"] = fault.message.partition("\n")[0]
        self._handler.emit(logging.makeLogRecord({"msg": json.dumps(line)}))

    def close(self) -> None:
        """Write what was added, and close the file. Once; otherwise at exit."""
        atexit.unregister(self.close)
        self._listener.stop()
        for handler in self._listener.handlers:
            handler.close()


def _described(string: ProcessorString) -> dict[str, Any]:
    if isinstance(string, InstalledProcessor):
        return {"name": string.name}
    return {"digest": string.digest}
