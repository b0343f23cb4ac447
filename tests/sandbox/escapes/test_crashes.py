"""A processor that crashes its own process, through C or machine code, affects nothing else."""

from __future__ import annotations

import platform
import re
import signal
from types import SimpleNamespace
from typing import Any

import pytest


def null_pointer(w: SimpleNamespace) -> None:
    import ctypes

    ctypes.string_at(0)


def jump_into_nothing(w: SimpleNamespace) -> None:
    import ctypes

    ctypes.CFUNCTYPE(None)(16)()


def abort(w: SimpleNamespace) -> None:
    import os

    os.abort()


def bus_error(w: SimpleNamespace) -> None:
    """Read a mapping past the end of its file."""
    import ctypes
    import os

    from attacker import kernel

    file = os.open(os.__file__, os.O_RDONLY)
    size = os.fstat(file).st_size + 3 * 4096
    ctypes.string_at(kernel({"x86_64": 9, "aarch64": 222}, 0, size, 1, 2, file, 0) + size - 4096, 1)


def free_invalid_pointer(w: SimpleNamespace) -> None:
    import ctypes

    ctypes.CDLL(None).free(ctypes.c_void_p(0x1001))


def break_the_interpreter(w: SimpleNamespace) -> None:
    import ctypes

    ctypes.memset(id(type), 0, 400)
    type("Class", (), {})


def write_into_code(w: SimpleNamespace) -> None:
    import ctypes

    ctypes.memset(ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value, 0, 8)


def exit_status(w: SimpleNamespace) -> None:
    import os

    os._exit(3)


def illegal_instruction(w: SimpleNamespace) -> None:
    from attacker import machine_code

    machine_code(b"\x0f\x0b")  # ud2


def division_by_zero(w: SimpleNamespace) -> None:
    from attacker import machine_code

    machine_code(b"\x31\xc9\xf7\xf1")  # xor ecx, ecx; div ecx


def stack_overflow(w: SimpleNamespace) -> None:
    from attacker import machine_code

    machine_code(b"\x50\xeb\xfd")  # again: push rax; jmp again


def breakpoint_(w: SimpleNamespace) -> None:
    from attacker import machine_code

    machine_code(b"\xcc")  # int3


def privileged_instruction(w: SimpleNamespace) -> None:
    from attacker import machine_code

    machine_code(b"\xf4")  # hlt


def call_of_32_bits(w: SimpleNamespace) -> int:
    """Use a number of another architecture, which a filter by number alone would allow."""
    from attacker import machine_code

    return machine_code(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret


def call_of_x32(w: SimpleNamespace) -> int:
    from attacker import machine_code

    return machine_code(b"\xb8\x27\x00\x00\x40\x0f\x05\xc3")  # mov eax, 0x40000027; syscall; ret


CRASHES: list[Any] = [
    (null_pointer, signal.SIGSEGV),
    (jump_into_nothing, signal.SIGSEGV),
    (abort, signal.SIGABRT),  # in a sandbox it cannot signal itself, and libc crashes instead
    (bus_error, signal.SIGBUS),
    (free_invalid_pointer, signal.SIGSEGV),
    (break_the_interpreter, signal.SIGSEGV),
    (write_into_code, signal.SIGSEGV),
]
OTHER_CALLS: list[Any] = []
if platform.machine() == "x86_64":
    CRASHES += [
        (illegal_instruction, signal.SIGILL),
        (division_by_zero, signal.SIGFPE),
        (stack_overflow, signal.SIGSEGV),
        (breakpoint_, signal.SIGTRAP),
        (privileged_instruction, signal.SIGSEGV),
    ]
    OTHER_CALLS += [call_of_32_bits, call_of_x32]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


def harmless(w: SimpleNamespace) -> str:
    return "fine"


def assert_crash_is_contained(report: Any, how: str, target: Any, sandboxed: Any) -> None:
    assert report.kinds == ["crash"]
    assert re.search(how, report.faults[0])
    assert sandboxed(harmless).answer == "returned 'fine'"  # the zygote still works
    assert target.changes(report) == []


@pytest.mark.parametrize(("attempt", "number"), CRASHES, ids=name_of)
def test_crash_is_contained(attempt: Any, number: signal.Signals, target: Any, sandboxed: Any) -> None:
    assert_crash_is_contained(sandboxed(attempt), f"ended its process: ({number.name}|SIGSEGV)", target, sandboxed)


@pytest.mark.parametrize(("attempt", "number"), CRASHES, ids=name_of)
def test_control_crashes(attempt: Any, number: signal.Signals, unsandboxed: Any) -> None:
    assert unsandboxed(attempt).status == -number


def test_exit_is_contained(target: Any, sandboxed: Any) -> None:
    assert_crash_is_contained(sandboxed(exit_status), "ended its process with exit status 3", target, sandboxed)


@pytest.mark.parametrize("attempt", OTHER_CALLS)
def test_calls_of_other_architectures_kill_the_process(attempt: Any, target: Any, sandboxed: Any) -> None:
    assert_crash_is_contained(sandboxed(attempt), "ended its process: SIGSYS", target, sandboxed)


@pytest.mark.parametrize("attempt", OTHER_CALLS)
def test_control_calls_of_other_architectures(attempt: Any, unsandboxed: Any) -> None:
    assert unsandboxed(attempt).status in (None, -signal.SIGSEGV)  # the kernel may lack them
