"""A processor cannot exceed its limits of memory, descriptors and time."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MEBIBYTES = 400
"""More than the 256 MiB that the sandboxes of these tests may allocate."""


# Memory


def bytes_of_memory(w: SimpleNamespace) -> None:
    import sys

    sys.held = []
    for _ in range(w.mebibytes):
        sys.held.append(b"x" * (1 << 20))


def tensors(w: SimpleNamespace) -> None:
    import sys

    import torch

    sys.held = []
    for _ in range(w.mebibytes):
        sys.held.append(torch.ones(1 << 18))


def one_tensor(w: SimpleNamespace) -> None:
    import sys

    import torch

    sys.held = torch.ones(w.mebibytes << 18)


def shared_mapping(w: SimpleNamespace) -> None:
    import mmap
    import sys

    sys.held = mmap.mmap(-1, w.mebibytes << 20)
    for page in range(0, w.mebibytes << 20, mmap.PAGESIZE):
        sys.held[page] = 1


def many_mappings(w: SimpleNamespace) -> None:
    import mmap
    import sys

    sys.held = []
    for _ in range(w.mebibytes):
        sys.held.append(mmap.mmap(-1, 1 << 20))
        sys.held[-1].write(b"x" * (1 << 20))


def mapping_of_a_library(w: SimpleNamespace) -> None:
    """Make private copies of a file's pages."""
    import ctypes
    import os

    from attacker import kernel

    file = os.open(os.__file__, os.O_RDONLY)
    for _ in range(w.mebibytes << 20 >> 14):
        ctypes.memset(kernel({"x86_64": 9, "aarch64": 222}, 0, 1 << 14, 3, 2, file, 0), 1, 1 << 14)  # mmap, MAP_PRIVATE


def memory_of_libc(w: SimpleNamespace) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype = ctypes.c_void_p
    for _ in range(w.mebibytes):
        address = libc.malloc(1 << 20)
        if not address:
            raise OSError(ctypes.get_errno(), "malloc")
        ctypes.memset(address, 1, 1 << 20)


def text_that_grows(w: SimpleNamespace) -> None:
    import sys

    sys.held = "x"
    while len(sys.held) < w.mebibytes << 20:
        sys.held *= 2


MEMORY: list[Any] = [
    (bytes_of_memory, "MemoryError: "),
    (tensors, "RuntimeError: .*DefaultCPUAllocator: can't allocate memory.*"),
    (one_tensor, "RuntimeError: .*DefaultCPUAllocator: can't allocate memory.*"),
    (shared_mapping, "ENOMEM"),
    (many_mappings, "ENOMEM|MemoryError: "),
    (mapping_of_a_library, "ENOMEM"),
    (memory_of_libc, "ENOMEM"),
    (text_that_grows, "MemoryError: "),
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


def nothing(w: SimpleNamespace) -> None: ...


def peak_memory(pid: int) -> int:
    """Return the peak resident memory of a process in MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.parametrize(("attempt", "refusal"), MEMORY, ids=name_of)
def test_memory_is_limited(attempt: Any, refusal: str, target: Any, sandboxed: Any) -> None:
    report = sandboxed(attempt, mebibytes=MEBIBYTES)
    taken = peak_memory(report.pid) - peak_memory(sandboxed(nothing).pid)
    assert re.fullmatch(refusal, report.answer, re.DOTALL)
    assert taken < 280
    assert target.changes(report) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("attempt", "refusal"), MEMORY, ids=name_of)
def test_control_memory_is_unlimited(attempt: Any, refusal: str, unsandboxed: Any) -> None:
    before = peak_memory(unsandboxed(nothing).pid)
    assert peak_memory(unsandboxed(attempt, mebibytes=MEBIBYTES).pid) - before > 380


def reserve_without_using(w: SimpleNamespace) -> None:
    import mmap

    mmap.mmap(-1, 100 << 30, flags=mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE


def descriptors(w: SimpleNamespace) -> None:
    import os

    for _ in range(100):
        os.open(os.__file__, os.O_RDONLY)


def copies_of_descriptors(w: SimpleNamespace) -> None:
    import fcntl

    for _ in range(100):
        fcntl.fcntl(0, fcntl.F_DUPFD, 3)


def raise_limit(w: SimpleNamespace) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS))


def raise_limit_by_other_call(w: SimpleNamespace) -> None:
    import os
    import resource

    resource.prlimit(os.getpid(), resource.RLIMIT_AS, (1 << 40, 1 << 40))


def change_nice_value(w: SimpleNamespace) -> None:
    import os

    os.nice(1)


def change_affinity(w: SimpleNamespace) -> None:
    import os

    os.sched_setaffinity(0, os.sched_getaffinity(0))


def alarm(w: SimpleNamespace) -> None:
    import signal

    signal.setitimer(signal.ITIMER_REAL, 1000)


def locked_memory(w: SimpleNamespace) -> None:
    from attacker import kernel

    kernel({"x86_64": 9, "aarch64": 222}, 0, 1 << 20, 3, 0x2022, -1, 0)  # mmap, MAP_LOCKED


@pytest.mark.parametrize(
    ("attempt", "refusal"),
    [
        (reserve_without_using, "ENOMEM"),
        (descriptors, "EMFILE"),
        (copies_of_descriptors, "EMFILE"),
        (raise_limit, "ValueError: not allowed to raise maximum limit"),
        (raise_limit_by_other_call, "EPERM"),
        (change_nice_value, "EPERM"),
        (change_affinity, "EPERM"),
        (alarm, "EPERM"),
        (locked_memory, "EPERM|EAGAIN"),
    ],
    ids=name_of,
)
def test_other_limits(attempt: Any, refusal: str, target: Any, sandboxed: Any, unsandboxed: Any) -> None:
    report = sandboxed(attempt)
    assert re.fullmatch(refusal, report.answer)
    assert target.changes(report) == []
    assert unsandboxed(attempt).answer == "returned None"


# Time


def loop(w: SimpleNamespace) -> None:
    while True:
        pass


def loop_that_catches_everything(w: SimpleNamespace) -> None:
    while True:
        try:
            loop(w)
        except BaseException:  # noqa: BLE001
            continue


def sleep(w: SimpleNamespace) -> None:
    import time

    time.sleep(1000)


def sleep_ignoring_signals(w: SimpleNamespace) -> None:
    import contextlib
    import signal

    for number in signal.valid_signals():
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    import time

    time.sleep(1000)


def stuck_in_c(w: SimpleNamespace) -> None:
    import re

    re.match(r"(a+)+b", "a" * 60)


def large_number(w: SimpleNamespace) -> int:
    return 7 ** (7**12) % 3


def deadlock(w: SimpleNamespace) -> None:
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read_the_connection(w: SimpleNamespace) -> None:
    import os

    from attacker import sockets

    while True:
        os.read(sockets()[0], 100)


def endless_tensor_work(w: SimpleNamespace) -> None:
    import torch

    x = torch.ones(1000, 1000)
    while True:
        x @ x


SLOW: list[Any] = [
    *(loop, loop_that_catches_everything, sleep, sleep_ignoring_signals, stuck_in_c, large_number, deadlock),
    *(read_the_connection, endless_tensor_work),
]


@pytest.mark.parametrize("attempt", SLOW, ids=name_of)
def test_call_deadline(attempt: Any, target: Any, short_deadlines: Any) -> None:
    processor = short_deadlines.load(short_deadlines.source(attempt))
    report = short_deadlines.call(processor)
    assert report.kinds == ["deadline"]
    assert short_deadlines.has_ended(processor)
    assert target.changes(report) == []


BODY = """
attempt(W)
class P(CustomLogitProcessor): ...
"""


@pytest.mark.parametrize("attempt", [loop, sleep_ignoring_signals, stuck_in_c], ids=name_of)
def test_load_deadline(attempt: Any, target: Any, short_deadlines: Any) -> None:
    report = short_deadlines(attempt, frame=BODY)
    limit = r"(3 s( of CPU time)?|15 s, in which it got [\d.]+ s of CPU time)"
    killed = rf"gave no answer within {limit}: its process was killed \(while it was loaded\)"
    assert re.search(killed, report.load_error)
    assert target.changes(report) == []


def answer_and_loop(w: SimpleNamespace) -> None:
    from attacker import answer, call_number

    answer(3, call_number())
    while True:
        pass


def answer_and_loop_in_the_kernel(w: SimpleNamespace) -> None:
    """Use system time instead of user time."""
    import os

    from attacker import answer, call_number

    answer(3, call_number())
    while True:
        os.stat("/")


@pytest.mark.parametrize("attempt", [answer_and_loop, answer_and_loop_in_the_kernel], ids=name_of)
def test_computing_between_calls_is_limited(attempt: Any, target: Any, short_deadlines: Any) -> None:
    processor = short_deadlines.load(short_deadlines.source(attempt))
    assert short_deadlines.call(processor).faults == []
    assert short_deadlines.has_ended(processor)
    assert processor.instance.sandbox.death.kind == "cpu_time"


# Text


LARGE = {
    "message": "raise ValueError('x' * (50 << 20))",
    "message that grows when it is read": "raise Error",
    "name of the exception": "raise type('x' * (1 << 20), (Exception,), {})",
    "many notes": "error = ValueError(); error.__notes__ = ['x' * 10000] * 10000; raise error",
    "long chain": "error = ValueError('x' * 10000)\n        for _ in range(10000):\n"
    "            new = ValueError('x' * 10000); new.__cause__ = error; error = new\n        raise error",
    "deep recursion": "self(logits)",
}


@pytest.mark.parametrize("what", LARGE)
def test_error_reports_are_truncated(what: str, sandboxed: Any) -> None:
    frame = f"""
class Error(Exception):
    def __str__(self):
        return 'x' * (50 << 20)
class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        {LARGE[what]}
"""
    report = sandboxed(nothing, frame=frame)
    assert report.kinds == ["exception"]
    assert len(report.faults[0]) < 20_000


def test_long_name_is_truncated(sandboxed: Any) -> None:
    frame = "P = type('x' * (1 << 20) + '\\x1b', (CustomLogitProcessor,), {'__call__': lambda self, logits, _: logits})"
    processor = sandboxed.load(sandboxed.source(nothing, frame=frame))
    assert processor.name == "x" * 200


def test_limits_in_proc(sandboxed: Any) -> None:
    report = sandboxed(copies_of_descriptors)
    with contextlib.suppress(PermissionError):  # not dumpable, so not even its own user may read it
        assert len(os.listdir(f"/proc/{report.pid}/fd")) <= 32
    limits = Path(f"/proc/{report.pid}/limits").read_text()
    assert re.search(r"Max open files\s+32\s+32", limits)
    assert re.search(r"Max processes\s+0\s+0", limits)
