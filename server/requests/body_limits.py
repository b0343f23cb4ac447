"""Limits of request bodies: the elements of one, and the memory of all that are being read or wait.

orjson builds all objects of a text in one call that holds the GIL: every stream stops meanwhile, whichever thread it
runs on. 16 MB of empty lists take it seconds and a gigabyte. So the keys and values are counted first, in blocks of
which each takes a millisecond or two.

They are weighted by the time and memory that they take. With the default bound of 2^19, `orjson.loads` takes 10 to
25 ms (one core of an AMD EPYC).
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from logitship.server.refusals import QueueFull

MAX_DEPTH = 512
"""Deepest nesting of a body. orjson itself takes 1024 levels; code that reads the objects recursively takes fewer."""

_BLOCK = 1 << 18
"""Bytes scanned at a time: some milliseconds at worst."""
_STRUCTURE = b'"[]{},:'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_WEIGHTS = {ord(","): 1, ord(":"): 3, ord("["): 4, ord("{"): 4}
"""Elements that are counted for each of these characters; a string counts one more. So a number counts 1, a string 2,
and a key, an object or a list 4."""
_NESTING = np.zeros(256, dtype=np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_QUOTE = ord('"')


@dataclass
class JSONScan:
    """The counts so far, and the state between two blocks.

    Attributes:
        elements: keys and values of a valid text, weighted; counted as its strings, and the brackets, commas and colons
            outside of them.
        depth: how deep the text is nested at its end.
        max_depth: how deep it is nested at most.
    """

    elements: int = 1
    depth: int = 0
    max_depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def add(self, block: bytes) -> None:
        """Count a block, which may end anywhere."""
        structure = self._structure(block)
        if not structure.size:
            return
        marks = structure.tobytes()
        self.elements += sum(weight * marks.count(mark) for mark, weight in _WEIGHTS.items())
        depths = np.cumsum(_NESTING[structure], dtype=np.int32)
        self.max_depth = max(self.max_depth, self.depth + int(depths.max()))
        self.depth += int(depths[-1])

    def _structure(self, block: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Count the strings that begin, and return the brackets, commas and colons outside strings, uint8 [n]."""
        marks = np.frombuffer(self._without_escapes(block).translate(None, _OTHERS), dtype=np.uint8)
        quotes = marks == _QUOTE
        inside = np.logical_xor.accumulate(quotes)
        if self._in_string:
            np.logical_not(inside, out=inside)
        if inside.size:
            self._in_string = bool(inside[-1])
        self.elements += int(np.count_nonzero(quotes & inside))
        outside: np.ndarray[Any, np.dtype[np.uint8]] = marks[~(inside | quotes)]
        return outside

    def _without_escapes(self, block: bytes) -> bytes:
        """Replace escaped quotes and backslashes, so that each quote that is left begins or ends a string."""
        if self._escaped:
            block = b"_" + block[1:]
        if b"\\" not in block:
            self._escaped = False
            return block
        # Pairs from the left: the backslash that begins a run is never escaped itself.
        block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = block.endswith(b"\\")
        return block


def scan_json(text: bytes, max_elements: int) -> JSONScan:
    """Count a JSON text, which need not be valid. Stops after a block with too many elements, or nested too deeply.

    Args:
        text: the text.
        max_elements: limit beyond which the number need not be exact.
    """
    scan = JSONScan()
    for start in range(0, len(text), _BLOCK):
        scan.add(text[start : start + _BLOCK])
        if scan.elements > max_elements or scan.max_depth > MAX_DEPTH:
            break
    return scan


BYTES_PER_ELEMENT = 64
"""Memory of a key or value of a decoded body, on top of its text: an integer in a list takes 40 bytes, an empty list or
object 64."""


class QueuedBytes:
    """Counts the bytes of bodies. Methods may be called from any thread.

    Args:
        limit: most bytes of all bodies.
        share: most bytes of one tenant's bodies.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._limit = limit
        self._share = share
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes of all bodies that are counted now."""
        with self._lock:
            return self._used.total()

    def open(self, tenant: str) -> QueuedBody:
        """Start to count a tenant's body, which has no bytes yet and one holder."""
        return QueuedBody(self, tenant)

    def take(self, tenant: str, size: int) -> None:
        """Count bytes of a tenant.

        Raises:
            QueueFull: there is no room for them.
        """
        with self._lock:
            used, own = self._used.total() + size, self._used[tenant] + size
            if own > self._share:
                raise QueueFull(
                    f"your requests that wait would take {own} bytes, this server holds at most {self._share} of a "
                    "client (--max-queued-bytes): try again when some of them have started"
                )
            if used > self._limit:
                raise QueueFull(
                    f"the requests that wait would take {used} bytes, this server holds at most {self._limit} "
                    "(--max-queued-bytes): try again later"
                )
            self._used[tenant] = own

    def give_back(self, tenant: str, size: int) -> None:
        """Stop counting bytes of a tenant."""
        with self._lock:
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]


class QueuedBody:
    """The bytes of one body, which are counted until its last holder has released it.

    The route holds it while it reads and parses the body. Each of the engine's requests holds it until it starts.

    Attributes:
        size: bytes that are counted for it: an estimate of its memory.
        depth: how deep it is nested; None if that is unknown.
    """

    def __init__(self, queued: QueuedBytes, tenant: str) -> None:
        self._queued = queued
        self._tenant = tenant
        self._holders = 1
        self._lock = threading.Lock()
        self.size = 0
        self.depth: int | None = None

    def add(self, size: int) -> None:
        """Count further bytes.

        Raises:
            QueueFull: there is no room for them.
        """
        self._queued.take(self._tenant, size)
        self.size += size

    def hold(self) -> QueuedBody:
        """Add a holder."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._queued.give_back(self._tenant, self.size)
