"""The protocol between the server and a sandbox.

Each sandbox has a stream socket and shared memory, float32 [max_rows, vocab]. The server copies the rows of a call into
the shared memory, and the sandbox writes its processor's result there. Everything else is sent through the socket, in
messages with a header of 16 bytes.

```
server → sandbox                                            answer
LOAD     the parts of a processor string                    LOADED (class description) or REFUSED (reason)
ATTACH   a sequence: parameters, prompt, output so far      none
FORK     a sequence, and the new sequence to copy it to     none
DETACH   a removed sequence                                 none
GROUP    the sequences of the rows, from now on             none
STEP     the new tokens of each row                         DONE, FAULTS, or AGAIN (send the rows again)
RETRY    the rows are in the shared memory again            DONE or FAULTS
```

Assumptions:
* The server does not trust a sandbox: not the length, type or timing of what it sends, nor that our worker sent it.
  Answers are bytes, numbers and JSON of bounded size; nothing is unpickled.
* A sandbox trusts the server, which sends plain values written with `marshal`.

Guarantees:
* A FORK is sent between two STEPs of its sequence, and copies the state after the first.
* At most one call is in flight. An answer has the `number` of its call.
* The sandbox may write to the shared memory at any time. The server copies the rows out, and only uses the copy.
"""

from __future__ import annotations

import struct
from enum import IntEnum

HEADER = struct.Struct("<IIQ")
"""Command or answer, number of the call (0 if it has no answer), length of the body."""

LONGEST_ANSWER = 1 << 16
"""Largest body of an answer, in bytes. The server reads no further, and kills a sandbox that sends more."""

FLOAT_BYTES = 4


class Command(IntEnum):
    """A message from the server to a sandbox."""

    LOAD = 1
    ATTACH = 2
    DETACH = 3
    STEP = 4
    RETRY = 5
    FORK = 6
    GROUP = 7


class Answer(IntEnum):
    """A message from a sandbox to the server."""

    LOADED = 1
    REFUSED = 2
    DONE = 3
    FAULTS = 4
    AGAIN = 5


def pack(message: int, number: int, body: bytes = b"") -> bytes:
    """Return the bytes of a message: header and body."""
    return HEADER.pack(message, number, len(body)) + body
