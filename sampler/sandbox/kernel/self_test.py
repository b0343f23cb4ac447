"""Self-test of the lockdown: operations that must fail in a sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import socket
import termios
from collections.abc import Callable
from pathlib import Path

from .syscalls import prctl, syscall

_REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS}
_HIDDEN = _REFUSED | {errno.ENOENT, errno.EROFS}
"""Errors with which the kernel may refuse access to a path."""
_HIGHEST_DESCRIPTOR = 4096

_CLONE_THREAD, _CLONE_NEWUSER = 0x00010000, 0x10000000
_PTRACE_TRACEME = 0
_PR_SET_NAME = 15


def run() -> list[str]:
    """Try all operations, in a locked-down process used for nothing else. Takes about 10 ms.

    Returns:
        Names of the operations that were not refused; empty if the lockdown works. An operation that fails for a reason
        other than the lockdown, such as a bad address, counts as not refused.
    """
    return [name for name, attempt, refusals in _ATTEMPTS if _succeeds(attempt, refusals)]


def _succeeds(attempt: Callable[[], object], refusals: set[int]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno not in refusals
    return True


def _write_file(folder: str) -> None:
    path = Path(folder, f"logitship-self-test-{os.getpid()}")
    path.write_bytes(b"")
    path.unlink()


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _connect() -> None:
    # Descriptor 0 is not a socket: if the filter lets the call pass, it fails with ENOTSOCK.
    syscall("connect", 0, b"\0" * 16, 16)


def _take_signals() -> None:
    for descriptor in _descriptors():
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())


def _push_input() -> None:
    fcntl.ioctl(0, termios.TIOCSTI, b"x")


def _raise_limit() -> None:
    soft_and_hard = (1 << 20).to_bytes(8, "little") * 2
    syscall("prlimit64", 0, resource.RLIMIT_NOFILE, ctypes.create_string_buffer(soft_and_hard), None)


def _inherited_descriptors() -> None:
    """Fail if there are only the three standard descriptors and the socket of the sandbox."""
    if len(_descriptors()) <= 4:
        raise PermissionError(errno.EPERM, "no inherited descriptor")


def _descriptors() -> list[int]:
    found = []
    for descriptor in range(_HIGHEST_DESCRIPTOR):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
            found.append(descriptor)
    return found


_ATTEMPTS: tuple[tuple[str, Callable[[], object], set[int]], ...] = (
    ("read /etc/passwd", lambda: os.open("/etc/passwd", os.O_RDONLY), _HIDDEN),
    ("read /proc/1/environ", lambda: os.open("/proc/1/environ", os.O_RDONLY), _HIDDEN),
    ("write in /tmp", lambda: _write_file("/tmp"), _HIDDEN),
    ("write in /dev/shm", lambda: _write_file("/dev/shm"), _HIDDEN),
    ("make a file in memory", lambda: syscall("memfd_create", b"test", 0), _REFUSED),
    ("open an internet socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM), _REFUSED),
    ("open a Unix socket", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), _REFUSED),
    ("open a netlink socket", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), _REFUSED),
    ("connect", _connect, _REFUSED),
    ("fork", _fork, _REFUSED),
    ("start a thread", lambda: syscall("clone", _CLONE_THREAD, 0, 0, 0, 0), _REFUSED),
    ("execute a program", lambda: syscall("execve", b"/nowhere", None, None), _REFUSED),
    ("signal the parent", lambda: os.kill(os.getppid(), 0), _REFUSED),
    ("redirect signals", _take_signals, _REFUSED),
    ("be traced", lambda: syscall("ptrace", _PTRACE_TRACEME, 0, 0, 0), _REFUSED),
    ("read another process", lambda: syscall("process_vm_readv", os.getppid(), None, 0, None, 0, 0), _REFUSED),
    ("raise a limit", _raise_limit, _REFUSED),
    ("enter a namespace", lambda: syscall("unshare", _CLONE_NEWUSER), _REFUSED),
    ("mount", lambda: syscall("mount", None, None, None, 0, None), _REFUSED),
    ("set up io_uring", lambda: syscall("io_uring_setup", 1, None), _REFUSED),
    ("load a BPF program", lambda: syscall("bpf", 0, None, 0), _REFUSED),
    ("become root", lambda: os.setuid(0), _REFUSED),
    ("change its own attributes", lambda: prctl(_PR_SET_NAME, 0), _REFUSED),
    ("type on the terminal", _push_input, _REFUSED),
    ("use an inherited descriptor", _inherited_descriptors, _REFUSED),
)
