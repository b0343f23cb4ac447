"""What a response says of each processor that its request carried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Receipt:
    """Proof that a processor was applied.

    Attributes:
        digest: the processor's identity, `sha256:…`.
        name: its class name.
        steps: number of decoding steps to which it was applied.
        milliseconds: its share of the time spent in the processor: a call's time divided by the rows of the call.
    """

    digest: str
    name: str
    steps: int
    milliseconds: float
