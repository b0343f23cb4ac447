"""Namespaces of Linux: what the zygote leaves behind, and what each sandbox leaves behind on top."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from . import privileges
from .syscalls import syscall

_FLAGS = {
    "user": 0x10000000,
    "pid": 0x20000000,
    "mount": 0x00020000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
}
_HOST_NAME = "sandbox"


def enter() -> tuple[str, ...]:
    """Move this process, which has one thread, into new namespaces, as many as the kernel gives.

    A process with the right to do so keeps its user namespace, so that a later change of user stays possible. Others
    make one, and have all rights inside. The pid namespace takes effect for children: the first is its pid 1, and all
    die with that one.

    Returns:
        what was entered: of "user", "pid", "mount", "net", "ipc", "uts" and "cgroup", empty if the kernel refused all.
    """
    uid, gid = os.geteuid(), os.getegid()  # in a new user namespace they are nobody's until they are mapped
    entered = _enter_each()
    if not entered and unshare("user"):
        _map_ids(uid, gid)
        entered = ("user", *_enter_each())
    if "uts" in entered:
        with contextlib.suppress(OSError):
            socket.sethostname(_HOST_NAME)
    return entered


def enter_for_sandbox() -> None:
    """Move a sandbox into namespaces of its own, below the zygote's, as far as the kernel allows.

    No id is mapped in the user namespace: nothing in it ever needs one.
    """
    if unshare("user", "net", "ipc", "uts", "cgroup"):
        return
    unshare("user")
    unshare("net", "ipc", "uts", "cgroup")


def unshare(*names: str) -> bool:
    """Move this process into new namespaces of these kinds, all or none. Whether the kernel agreed."""
    try:
        syscall("unshare", sum(_FLAGS[name] for name in names))
    except OSError:
        return False
    return True


def _enter_each() -> tuple[str, ...]:
    return tuple(name for name in _FLAGS if name != "user" and unshare(name))


def _map_ids(uid: int, gid: int) -> None:
    # The maps belong to root where a process is not dumpable, as after a change of user.
    privileges.set_dumpable(True)
    own = Path("/proc/self")
    with contextlib.suppress(OSError):
        (own / "setgroups").write_text("deny")  # what an ordinary user must give up for a gid_map
        (own / "gid_map").write_text(f"{gid} {gid} 1")
        (own / "uid_map").write_text(f"{uid} {uid} 1")
