"""Bounds on a JSON text, counted in its bytes before anything is built of it.

orjson builds all objects of a text in one call that holds the GIL: every stream stops meanwhile, whichever thread it
runs on. 16 MB of empty lists take it seconds and a gigabyte. So the keys and values are counted first, in blocks of
which each takes a millisecond or two.

They are weighted by the time and memory that they take. With the default bound of 2^20, `orjson.loads` takes 15 to
75 ms (one core of an AMD EPYC): 30 ms for a million integers, 50 ms for a million short strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_DEPTH = 512
"""Deepest nesting of a body. orjson itself takes 1024 levels; what reads the objects recursively takes fewer."""

_BLOCK = 1 << 18
"""Bytes scanned at a time: some milliseconds at worst."""
_STRUCTURE = b'"[]{},:'
_OTHERS = bytes(set(range(256)) - set(_STRUCTURE))
_WEIGHTS = {ord(","): 1, ord(":"): 3, ord("["): 4, ord("{"): 4}
"""Elements by what precedes them. An object or a list weighs as much as four numbers, and a key as three."""
_NESTING = np.zeros(256, dtype=np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1
_QUOTE = ord('"')


@dataclass
class JSONScan:
    """The counts so far, and the state between two blocks.

    Attributes:
        elements: keys and values of a valid text, weighted; counted as its brackets, commas and colons outside strings.
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
        """Return the brackets, commas and colons outside strings, uint8 [n]."""
        marks = np.frombuffer(self._without_escapes(block).translate(None, _OTHERS), dtype=np.uint8)
        quotes = marks == _QUOTE
        inside = np.logical_xor.accumulate(quotes)
        if self._in_string:
            np.logical_not(inside, out=inside)
        if inside.size:
            self._in_string = bool(inside[-1])
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
        max_elements: elements beyond which nobody needs the exact number.
    """
    scan = JSONScan()
    for start in range(0, len(text), _BLOCK):
        scan.add(text[start : start + _BLOCK])
        if scan.elements > max_elements or scan.max_depth > MAX_DEPTH:
            break
    return scan
