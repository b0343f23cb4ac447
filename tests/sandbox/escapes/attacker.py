"""Helpers of the hostile processors. Their source is shipped with each, as a module named `attacker`.

A processor makes attempts, records their outcomes, and reports them to the test through the logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any

OUTCOMES: list[dict[str, Any]] = []
"""Return value or exception of each attempt."""

MAX_TEXT_LENGTH = 3000

_SIGPROCMASK = {"x86_64": 14, "aarch64": 135}


def run(attempt: Callable[[Any], object], target: Any) -> None:
    """Make an attempt, and record its outcome."""
    try:
        returned = attempt(target)
    except BaseException as error:  # noqa: BLE001  # reported to the test
        text = f"{type(error).__name__}: {error}"
        OUTCOMES.append({"raised": text[:MAX_TEXT_LENGTH], "errno": getattr(error, "errno", None)})
    else:
        OUTCOMES.append({"returned": repr(returned)[:MAX_TEXT_LENGTH]})


def report(logits: Any) -> Any:
    """Write the outcomes into the first row: a length, then that many bytes."""
    import torch

    text = json.dumps(OUTCOMES).encode()
    logits[0, 0] = len(text)
    logits[0, 1 : 1 + len(text)] = torch.tensor(list(text), dtype=torch.float32)
    return logits


def kernel(number: int | dict[str, int], *arguments: Any) -> int:
    """Make a system call that Python does not wrap, by its number or its numbers by architecture."""
    if isinstance(number, dict):
        number = number[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def machine_code(code: bytes) -> int:
    """Execute bytes as a function."""
    import mmap

    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_long)(address)())


def sockets() -> list[int]:
    """Return the descriptors of sockets. A sandbox has one, its connection to the server."""
    found = []
    for descriptor in range(3, 1024):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
        except OSError:
            pass
    return found


def answer(kind: int, number: int, body: bytes = b"") -> None:
    """Send an answer to the server, valid or not."""
    send(struct.pack("<IIQ", kind, number, len(body)) + body)


def send(data: bytes) -> None:
    """Send bytes to the server."""
    while data:
        data = data[os.write(sockets()[0], data) :]


def call_number() -> int:
    """Return the number of the current call, from the frame of the worker's `serve`."""
    frame = sys._getframe()
    while frame.f_code.co_name != "serve" or "server" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return int(frame.f_locals["server"]._number)


def shared_memory() -> Any:
    """Return the whole shared memory as a tensor."""
    frame = sys._getframe()
    while "worker" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["worker"]._logits


def is_mapped(address: int) -> bool:
    """Return whether memory at this address is readable, without a crash: the kernel tries to read it."""
    old = ctypes.create_string_buffer(8)
    try:  # rt_sigprocmask(SIG_BLOCK, address)
        kernel(_SIGPROCMASK, 0, ctypes.c_void_p(address), old, 8)
    except OSError:
        return False
    kernel(_SIGPROCMASK, 2, old, None, 8)
    return True


def abstract(name: str) -> socket.socket:
    """Connect to a Unix socket in the abstract namespace."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + name)
    return connection
