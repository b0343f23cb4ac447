"""Giving up what a process may do: its user, its capabilities, and the ways to get any back."""

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
    """Effective, permitted and inheritable: the low 32 capabilities, then the others."""

    _fields_ = (("words", ctypes.c_uint32 * 6),)


def capabilities() -> int:
    """The effective capabilities of this thread, a bit each.

    Raises:
        OSError: the kernel refused.
    """
    sets = _CapabilitySets()
    syscall("capget", _CapabilityHeader(_CAPABILITY_VERSION_3, 0), sets)
    return int(sets.words[0]) | int(sets.words[3]) << 32


def can_become(uid: int, gid: int) -> bool:
    """Whether `become` would work. A forked child tries it, so this process must have one thread."""
    child = os.fork()
    if child == 0:
        try:
            become(uid, gid)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def become(uid: int, gid: int) -> None:
    """Change to a user and a group, for good, without supplementary groups.

    Raises:
        OSError: this process may not.
    """
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Empty every capability set of this thread, the bounding and the ambient one too.

    Raises:
        OSError: some are left.
    """
    # Dropping from the bounding set takes a capability; who lacks it has none to drop.
    with contextlib.suppress(PermissionError):
        _empty_bounding_set()
    with contextlib.suppress(OSError):  # Linux before 4.3 has no ambient set
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    syscall("capset", _CapabilityHeader(_CAPABILITY_VERSION_3, 0), _CapabilitySets())
    if capabilities():
        raise PermissionError(errno.EPERM, "capabilities are left")


def forbid_new_privileges() -> None:
    """No program that this process executes can raise its rights; needed for seccomp and Landlock."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(allowed: bool) -> None:
    """Let processes of the same user look into this one, or not; no core is written either."""
    prctl(_PR_SET_DUMPABLE, int(allowed))


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal when the thread that forked this process ends. A change of user undoes it."""
    prctl(_PR_SET_PDEATHSIG, signal_number)


def _empty_bounding_set() -> None:
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # the kernel's last one was before
