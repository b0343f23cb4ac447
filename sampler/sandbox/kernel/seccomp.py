"""The seccomp filter of a sandbox: an allow-list of system calls, some with conditions on their arguments.

Calls not listed fail with EPERM, including those of later kernels.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import termios
from dataclasses import dataclass

from . import bpf, privileges
from .syscalls import Machine, prctl, syscall, this_machine

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_SECCOMP_GET_ACTION_AVAIL = 2

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
NOT_PERMITTED = 0x00050000 | errno.EPERM
NOT_IMPLEMENTED = 0x00050000 | errno.ENOSYS

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_FIRST_X32_NUMBER = 0x40000000


@dataclass(frozen=True)
class OneOf:
    """The low 32 bits of the argument (the kernel ignores the others of an int) are one of `values`."""

    argument: int
    values: tuple[int, ...]

    def compile(self) -> list[bpf.Instruction]:
        """Return instructions that fall through if the condition holds, and refuse the call otherwise."""
        last = len(self.values)
        tests = [bpf.jump_if_equal(value, last - index, 0) for index, value in enumerate(self.values)]
        return [bpf.load(_low(self.argument)), *tests, bpf.return_value(NOT_PERMITTED)]


@dataclass(frozen=True)
class OnlyBits:
    """The low 32 bits of the argument have no bit set outside `mask`."""

    argument: int
    mask: int

    def compile(self) -> list[bpf.Instruction]:
        """Return instructions that fall through if the condition holds, and refuse the call otherwise."""
        others = ~self.mask & 0xFFFFFFFF
        return [bpf.load(_low(self.argument)), bpf.jump_if_any_bit(others, 0, 1), bpf.return_value(NOT_PERMITTED)]


@dataclass(frozen=True)
class IsNull:
    """All 64 bits of the argument are zero."""

    argument: int

    def compile(self) -> list[bpf.Instruction]:
        """Return instructions that fall through if the condition holds, and refuse the call otherwise."""
        return [
            bpf.load(_low(self.argument)),
            bpf.jump_if_equal(0, 0, 2),
            bpf.load(_low(self.argument) + 4),
            bpf.jump_if_equal(0, 1, 0),
            bpf.return_value(NOT_PERMITTED),
        ]


Condition = OneOf | OnlyBits | IsNull
Rules = dict[str, tuple[Condition, ...]]

_FUTEX_PRIVATE, _FUTEX_REALTIME = 128, 256
_FUTEX_OPERATIONS = (0, 1, 3, 4, 9, 10)  # wait, wake, requeue, cmp_requeue, wait_bitset, wake_bitset

_OPEN_FOR_READING = {
    name: os.O_CLOEXEC | os.O_NONBLOCK | directory | no_follow | large_file
    for name, directory, no_follow, large_file in (
        ("x86_64", 0o200000, 0o400000, 0o100000),
        ("aarch64", 0o040000, 0o100000, 0o400000),
    )
}
"""Flags of open(2) allowed for reading, by machine. The kernel's values, because glibc defines O_LARGEFILE as 0."""

_TCGETS2 = 0x802C542A
_HARMLESS_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)
"""normal, random, sequential, willneed, dontneed, free, (no)hugepage, (don't)dump: used by allocators and numpy."""

_UNCONDITIONAL = (
    # those of a step first, because the filter is evaluated from the top
    *("read", "write", "mmap", "munmap", "brk", "mprotect", "mremap"),
    *("close", "readv", "writev", "pread64", "lseek", "fstat", "poll", "ppoll"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall", "exit", "exit_group"),
    *("gettimeofday", "time", "nanosleep", "getrandom"),
    *("getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"),
    *("getcpu", "sched_yield", "getrusage", "sysinfo", "uname"),
)

_READING_FILES = (
    *("newfstatat", "stat", "lstat", "statx", "access", "faccessat", "faccessat2"),
    *("readlink", "readlinkat", "getcwd", "getdents64"),
)


def rules(machine: Machine, *, opens_files: bool) -> Rules:
    """Return the allowed system calls, each with the conditions that its arguments must satisfy.

    Args:
        machine: the architecture.
        opens_files: allow opening files for reading, and system calls on paths. A filter cannot inspect paths, so
            Landlock or a private root directory must restrict them.
    """
    allowed: Rules = dict.fromkeys(_UNCONDITIONAL, ())
    # Other advice includes MADV_MERGEABLE, a side channel: the timing of merged pages reveals other processes' memory.
    allowed["madvise"] = (OneOf(2, _HARMLESS_ADVICE),)
    # Higher ids are CPU clocks of other processes, which reveal how busy another tenant's sandbox is.
    for name in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        allowed[name] = (OnlyBits(0, 0b1111),)
    allowed["futex"] = (OneOf(1, _futex_operations()),)
    # F_SETOWN and F_SETSIG could deliver any signal to any process of the same user, although kill(2) is refused.
    allowed["fcntl"] = (OneOf(1, (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC)),)
    # TCGETS implements isatty(3), which Python calls for each file it opens.
    allowed["ioctl"] = (OneOf(1, (termios.TCGETS, _TCGETS2, termios.FIOCLEX, termios.FIONCLEX)),)
    allowed["prlimit64"] = (OneOf(0, (0,)), IsNull(2))
    allowed["sched_getaffinity"] = (OneOf(0, (0,)),)
    if opens_files:
        allowed |= dict.fromkeys(_READING_FILES, ())
        for_reading = _OPEN_FOR_READING[machine.name]
        allowed["open"] = (OnlyBits(1, for_reading),)
        allowed["openat"] = (OnlyBits(2, for_reading),)
    return {name: conditions for name, conditions in allowed.items() if name in machine.numbers}


def filter_program(machine: Machine, *, opens_files: bool) -> bytes:
    """Compile `rules` for `install`."""
    instructions = [
        bpf.load(_ARCHITECTURE),
        bpf.jump_if_equal(machine.audit_arch, 1, 0),
        bpf.return_value(KILL_PROCESS),
        bpf.load(_NUMBER),
    ]
    if machine.name == "x86_64":  # the x32 ABI has the same architecture value
        instructions += [bpf.jump_if_at_least(_FIRST_X32_NUMBER, 0, 1), bpf.return_value(KILL_PROCESS)]
    for name, conditions in rules(machine, opens_files=opens_files).items():
        body = [each for condition in conditions for each in condition.compile()] + [bpf.return_value(ALLOW)]
        instructions += [bpf.jump_if_equal(machine.numbers[name], 0, len(body)), *body]
    # Their flags are passed by pointer, which a filter cannot dereference. On ENOSYS, libc uses the older call.
    for name in ("clone3", "openat2"):
        instructions += [bpf.jump_if_equal(machine.numbers[name], 0, 1), bpf.return_value(NOT_IMPLEMENTED)]
    return bpf.assemble([*instructions, bpf.return_value(NOT_PERMITTED)])


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Install a filter for this thread's system calls, irrevocably. Requires no_new_privs.

    Raises:
        OSError: the system call failed.
    """
    sock_fprog = _Program(len(program) // 8, program)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(sock_fprog))


def available() -> bool:
    """Return whether this kernel supports filters with SECCOMP_RET_KILL_PROCESS (Linux 4.14).

    gVisor answers EINVAL to each operation of seccomp(2) but the one that installs a filter
    (<https://github.com/google/gvisor/issues/13439>). There, a forked child tries one, so this process must be
    single-threaded.
    """
    try:
        syscall("seccomp", _SECCOMP_GET_ACTION_AVAIL, 0, KILL_PROCESS.to_bytes(4, "little"))
    except OSError as error:
        return error.errno == errno.EINVAL and _filter_works()
    return True


def _filter_works() -> bool:
    """Return whether a filter in a child refuses a call, and another ends the child with SIGSYS."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            privileges.forbid_new_privileges()
            install(_trial_program(this_machine()))
            if _errno_of("getppid") == errno.EPERM:
                syscall("getuid")
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSYS


def _trial_program(machine: Machine) -> bytes:
    refused, killing = machine.numbers["getppid"], machine.numbers["getuid"]
    return bpf.assemble(
        [
            bpf.load(_NUMBER),
            *(bpf.jump_if_equal(refused, 0, 1), bpf.return_value(NOT_PERMITTED)),
            *(bpf.jump_if_equal(killing, 0, 1), bpf.return_value(KILL_PROCESS)),
            bpf.return_value(ALLOW),
        ]
    )


def _errno_of(name: str) -> int:
    try:
        syscall(name)
    except OSError as error:
        return error.errno or 0
    return 0


def _futex_operations() -> tuple[int, ...]:
    plain = (*_FUTEX_OPERATIONS, 9 | _FUTEX_REALTIME)
    return (*plain, *(each | _FUTEX_PRIVATE for each in plain))


def _low(argument: int) -> int:
    return _ARGUMENTS + 8 * argument
