"""Processor strings that were uploaded once, for requests that name them by their digest."""

from __future__ import annotations

import threading
from collections import OrderedDict

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import InstalledProcessor, PickledProcessor, ProcessorString, SourceProcessor


class RegisteredProcessors:
    """Strings by digest, bounded: the least recently used goes first. Safe to use from several threads.

    They outlive their loaded processors: a string that is named after its processor has left the cache is loaded again.

    Args:
        max_entries: most strings that are kept.
        max_bytes: most bytes that they count for, all together.
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._strings: OrderedDict[str, ProcessorString] = OrderedDict()
        self._bytes = 0

    def add(self, digest: str, string: ProcessorString) -> None:
        """Keep a string. Another under the same digest runs the same code: the newer one replaces it.

        Raises:
            ProcessorLoadError: it is larger than all of them together may be.
        """
        size = _size(string)
        if size > self._max_bytes:
            raise ProcessorLoadError(
                f"the processor string counts for {size} bytes, more than the {self._max_bytes} that the server keeps "
                "of all registered ones together: send it with each request"
            )
        with self._lock:
            if digest in self._strings:
                self._drop(digest)
            while len(self._strings) >= self._max_entries or self._bytes + size > self._max_bytes:
                self._drop(next(iter(self._strings)))
            self._strings[digest] = string
            self._bytes += size

    def get(self, digest: str) -> ProcessorString:
        """The string of a digest.

        Raises:
            ProcessorLoadError: there is none, or none any more.
        """
        with self._lock:
            if digest not in self._strings:
                raise ProcessorLoadError(
                    f"no processor {digest} is registered: it never was, or it was dropped to make room for others. "
                    "Register it again, or send the whole processor string"
                )
            self._strings.move_to_end(digest)
            return self._strings[digest]

    def find(self, digest: str) -> ProcessorString | None:
        """The same, without counting as a use; None if there is none."""
        with self._lock:
            return self._strings.get(digest)

    def _drop(self, digest: str) -> None:
        self._bytes -= _size(self._strings.pop(digest))


def _size(string: ProcessorString) -> int:
    match string:
        case SourceProcessor():
            return len(string.source.encode()) + len(string.captured)
        case PickledProcessor():
            described = 0 if string.source is None else _size(string.source)
            return len(string.payload) + described + _schema_size(string)
        case InstalledProcessor():
            return len(string.name)
        case _:
            raise TypeError(f"a digest cannot stand for a {type(string).__name__}")


def _schema_size(string: PickledProcessor) -> int:
    try:
        return len(orjson.dumps(string.params_schema))
    except orjson.JSONEncodeError as error:  # it reads deeper nesting than it writes
        raise ProcessorLoadError(f"'logitship.params_schema': {error}") from None
