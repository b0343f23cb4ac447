"""Linux namespaces of the zygote and of each sandbox."""

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
    """Move this single-threaded process into new namespaces, as many as the kernel permits.

    A privileged process stays in its user namespace, so that it can still change its user later. An unprivileged one
    creates a user namespace, in which it has all capabilities. The PID namespace applies to children only: the first
    has PID 1, and all others are killed when it terminates.

    Returns:
        The namespaces entered, of "user", "pid", "mount", "net", "ipc", "uts" and "cgroup"; empty if none is permitted.
    """
    uid, gid = os.geteuid(), os.getegid()  # unmapped in a new user namespace until `_map_ids`
    entered = _enter_each()
    if not entered and unshare("user"):
        _map_ids(uid, gid)
        entered = ("user", *_enter_each())
    if "uts" in entered:
        with contextlib.suppress(OSError):
            socket.sethostname(_HOST_NAME)
    return entered


def enter_for_sandbox() -> None:
    """Move a sandbox into new namespaces below the zygote's, each that the kernel permits: gVisor has no cgroup one.

    No ids are mapped in its user namespace, because a sandbox needs none.
    """
    for name in ("user", "net", "ipc", "uts", "cgroup"):
        unshare(name)


def unshare(*names: str) -> bool:
    """Move this process into new namespaces of these types, all or none. Return whether that succeeded."""
    try:
        syscall("unshare", sum(_FLAGS[name] for name in names))
    except OSError:
        return False
    return True


def _enter_each() -> tuple[str, ...]:
    return tuple(name for name in _FLAGS if name != "user" and unshare(name))


def _map_ids(uid: int, gid: int) -> None:
    # The map files of a process that is not dumpable, as after a change of user, are owned by root.
    privileges.set_dumpable(True)
    own = Path("/proc/self")
    with contextlib.suppress(OSError):
        (own / "setgroups").write_text("deny")  # required to write gid_map without privileges
        (own / "gid_map").write_text(f"{gid} {gid} 1")
        (own / "uid_map").write_text(f"{uid} {uid} 1")
