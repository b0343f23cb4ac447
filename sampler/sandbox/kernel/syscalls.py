"""System calls by name, for those that Python does not wrap, and their numbers by architecture."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from dataclasses import dataclass

NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "access": (21, None),
    "bpf": (321, 280),
    "brk": (12, 214),
    "capget": (125, 90),
    "capset": (126, 91),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "close_range": (436, 436),
    "connect": (42, 203),
    "execve": (59, 221),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "pivot_root": (155, 41),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "seccomp": (317, 277),
    "setuid": (105, 146),
    "sigaltstack": (131, 132),
    "socket": (41, 198),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, None),
    "umount2": (166, 39),
    "uname": (63, 160),
    "unshare": (272, 97),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Numbers on x86_64 and on aarch64 by name; None if the architecture lacks the call. From the kernel's
`arch/x86/entry/syscalls/syscall_64.tbl` and `include/uapi/asm-generic/unistd.h`."""


@dataclass(frozen=True)
class Machine:
    """A CPU architecture.

    Attributes:
        name: the name printed by `uname -m`.
        audit_arch: its `AUDIT_ARCH_…` value of `linux/audit.h`, which is passed to a seccomp filter.
        numbers: system call numbers by name, of the calls in `NUMBERS` that it has.
    """

    name: str
    audit_arch: int
    numbers: dict[str, int]


def _machine(name: str, audit_arch: int, column: int) -> Machine:
    numbers = {call: row[column] for call, row in NUMBERS.items()}
    return Machine(name, audit_arch, {call: number for call, number in numbers.items() if number is not None})


MACHINES = {
    "x86_64": _machine("x86_64", 0xC000003E, 0),
    "aarch64": _machine("aarch64", 0xC00000B7, 1),
}


@functools.cache
def this_machine() -> Machine:
    """Return the architecture of this machine.

    Raises:
        OSError: ENOSYS; the architecture or operating system is not supported.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None or platform.system() != "Linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        where = f"{platform.system()} on {platform.machine()}"
        raise OSError(errno.ENOSYS, f"sandboxes need 64-bit Linux on {' or '.join(MACHINES)}; this is {where}")
    return machine


_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | ctypes.Structure | None) -> int:
    """Make a system call.

    Args:
        name: a key of `NUMBERS`.
        *arguments: numbers; strings, NUL-terminated automatically; buffers and structures, passed by address.

    Raises:
        OSError: the system call failed.
    """
    function = _libc.syscall
    function.restype = ctypes.c_long
    result: int = function(ctypes.c_long(this_machine().numbers[name]), *map(_argument, arguments))
    return _checked(result, name)


def prctl(option: int, *arguments: int) -> int:
    """Perform a process control operation. Missing arguments are 0, as most options require.

    Raises:
        OSError: the system call failed.
    """
    words = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    result: int = _libc.prctl(option, *words)
    return _checked(result, "prctl")


def _argument(value: int | bytes | ctypes.Array[ctypes.c_char] | ctypes.Structure | None) -> object:
    # ctypes would truncate an int to 32 bits, and pass structures by value.
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    return ctypes.c_void_p(None) if value is None else value


def _checked(result: int, name: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
