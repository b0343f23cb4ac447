"""What travels between the server and a sandbox.

One stream socket and one shared region a sandbox. The region is float32 [max_rows, vocab]: the server copies the rows
of a call into it, the sandbox leaves in it what its processor made of them. Everything else goes through the socket,
each message with a header of 16 bytes.

```
server → sandbox                                            answer
LOAD     a processor string, in pieces                      LOADED (what its class says of itself) or REFUSED (why)
ATTACH   a sequence: parameters, prompt, output so far      none
FORK     a sequence, and another that goes on from it       none
DETACH   a sequence that left                               none
GROUP    the sequences of the rows, from now on             none
STEP     of each row: the tokens that it gained             DONE, FAULTS, or AGAIN: send the rows once more
RETRY    the rows are in the region once more               DONE or FAULTS
```

Assumptions:
* The server trusts nothing that a sandbox sends: not its length, type or timing, and not that it is a sandbox's program
  that answers. Answers are bytes, numbers and JSON, each bounded; nothing is unpickled.
* A sandbox trusts the server: what the server sends is `marshal`, whose values are plain.

Guarantees:
* A FORK comes between two STEPs of its sequence, and copies the state that the first one left.
* One call is under way at a time. `number` is the call's, and its answer's.
* The sandbox may write into the region at any time. The server takes a copy, and looks only at that.
"""

from __future__ import annotations

import struct
from enum import IntEnum

HEADER = struct.Struct("<IIQ")
"""Command, number of the call, bytes of the body."""

LONGEST_ANSWER = 1 << 16
"""Bytes of an answer's body. The server reads no further, and takes a longer one for an attack."""

FLOAT_BYTES = 4


class Command(IntEnum):
    """Of a message."""

    LOAD = 1
    ATTACH = 2
    DETACH = 3
    STEP = 4
    RETRY = 5
    FORK = 6
    GROUP = 7


class Answer(IntEnum):
    """Of a sandbox."""

    LOADED = 1
    REFUSED = 2
    DONE = 3
    FAULTS = 4
    AGAIN = 5


def pack(kind: int, number: int, body: bytes = b"") -> bytes:
    """A message."""
    return HEADER.pack(kind, number, len(body)) + body
