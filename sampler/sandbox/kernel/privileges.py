"""Dropping privileges: user, capabilities, and the ways to regain them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from .syscalls import prctl, syscall

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_CAPABILITY_VERSION_3 = 0x20080522


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilitySets(ctypes.Structure):
    """Effective, permitted and inheritable sets: the low 32 bits of each, then the high bits."""

    _fields_ = (("words", ctypes.c_uint32 * 6),)


def capabilities() -> int:
    """Return the effective capabilities of this thread as a bit mask.

    Raises:
        OSError: the system call failed.
    """
    sets = _CapabilitySets()
    syscall("capget", _CapabilityHeader(_CAPABILITY_VERSION_3, 0), sets)
    return int(sets.words[0]) | int(sets.words[3]) << 32


def can_become(uid: int, gid: int) -> bool:
    """Return whether `become` would succeed. A forked child tries it, so this process must be single-threaded."""
    child = os.fork()
    if child == 0:
        try:
            become(uid, gid)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def become(uid: int, gid: int) -> None:
    """Change user and group irrevocably, and drop supplementary groups.

    Raises:
        OSError: this process lacks the privileges.
    """
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Clear all capability sets of this thread, including the bounding and the ambient set.

    Raises:
        OSError: capabilities remain.
    """
    # Dropping from the bounding set requires CAP_SETPCAP. A process without it has no capabilities to drop.
    with contextlib.suppress(PermissionError):
        _empty_bounding_set()
    with contextlib.suppress(OSError):  # Linux before 4.3 has no ambient set
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    syscall("capset", _CapabilityHeader(_CAPABILITY_VERSION_3, 0), _CapabilitySets())
    if capabilities():
        raise PermissionError(errno.EPERM, "capabilities remain")


def forbid_new_privileges() -> None:
    """Set no_new_privs: execve(2) grants no privileges. Required by seccomp and Landlock."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(allowed: bool) -> None:
    """Set the dumpable attribute: whether processes of the same user may ptrace this one, and cores are dumped."""
    prctl(_PR_SET_DUMPABLE, int(allowed))


def die_with_parent(signal_number: int) -> None:
    """Set the parent-death signal, sent when the thread that forked this process exits. Cleared by a change of user."""
    prctl(_PR_SET_PDEATHSIG, signal_number)


def _empty_bounding_set() -> None:
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # past the kernel's last capability
