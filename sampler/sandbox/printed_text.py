"""Standard output and error of the author's code in a sandbox: sent to the server line by line."""

from __future__ import annotations

import io
from collections.abc import Callable

from .protocol import HEADER

_MAX_LINE_LENGTH = 1 << 10
"""Characters after which an unfinished line is sent."""
_CUT = "… (the rest of this call's output is dropped)\n"


class PrintedText(io.TextIOBase):
    """A text stream for `sys.stdout` and `sys.stderr`.

    Args:
        send: takes some UTF-8, and returns False if it has to be sent later.
    """

    def __init__(self, send: Callable[[bytes], bool]) -> None:
        self._send = send
        self._line = ""
        self._room = -1
        """Bytes that may still be sent; negative once it was said that the rest is dropped."""

    def begin(self, num_bytes: int) -> None:
        """Begin a call, in which at most `num_bytes` are sent, with headers."""
        self._room = num_bytes - HEADER.size - len(_CUT.encode())

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write text. A line is sent when it ends."""
        self._line += str.__str__(text)[: max(0, self._room + 1)]  # one more than fits, so that it is cut
        if "\n" in self._line or len(self._line) >= _MAX_LINE_LENGTH:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what was written."""
        line = self._line
        if not line:
            return
        body = line.encode(errors="replace")
        size = HEADER.size + len(body)
        if size > self._room >= 0:
            start = body[: max(0, self._room - HEADER.size)].decode(errors="ignore")  # no part of a character
            body = (start + _CUT).encode()
        if self._room < 0 or self._send(body):
            self._line = ""
            self._room -= size
