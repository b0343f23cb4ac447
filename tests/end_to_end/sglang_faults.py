"""Processors that break their contract, each in another way, from their third call for a request on."""

from __future__ import annotations

import json

FAULTS: dict[str, str] = {
    "raises": "raise ValueError('as requested')",
    "raises a system exit": "raise SystemExit(3)",
    "raises a keyboard interrupt": "raise KeyboardInterrupt",
    "raises without end": "def deeper(): return deeper()\n        deeper()",
    "raises what has no text": "class E(Exception):\n            __str__ = None\n        raise E",
    "raises a megabyte": "raise ValueError('x' * (1 << 20))",
    "fails an assertion": "assert logits.sum() > 1e30",
    "leaves a NaN": "logits[:, 0] = float('nan')",
    "leaves an infinity": "logits[:, 0] = float('inf')",
    "forbids everything": "logits.fill_(-float('inf'))",
    "returns nothing": "return None",
    "returns a list": "return logits.tolist()",
    "returns a column less": "return logits[:, :-1]",
    "returns a row more": "return torch.cat([logits, logits])",
    "returns integers": "return logits.to(torch.int64)",
    "returns booleans": "return logits > 0",
    "exits": "os._exit(3)",
    "aborts": "os.abort()",
    "kills itself": "os.kill(os.getpid(), 9)",
    "dereferences null": "import ctypes; ctypes.string_at(0)",
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "takes all memory": "pieces = [bytes([1]) * (1 << 24) for _ in range(1 << 10)]",
    "forks": "while True: os.fork()",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "closes its files": "os.closerange(0, 4096)",
}

_SOURCE = """
import os
import torch
from logitship import CustomLogitProcessor

class Faulty(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        if all(len(params["__req__"].output_ids) < 2 for params in custom_param_list):
            return logits
        {fault}
        return logits
"""


def faulty(kind: str) -> str:
    """Return the processor string of a kind of `FAULTS`."""
    return json.dumps({"source": _SOURCE.format(fault=FAULTS[kind]), "class_name": "Faulty"})
